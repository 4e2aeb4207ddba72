"""txl_lightning without Hydra: a module, a data module, and Lightning's own Trainer."""

import lightning.pytorch as L

from txl_lightning import TextDataModule, TransformerXLModule
from txl_lightning.config import load


def main(overrides: list[str]) -> L.Trainer:
    config = load(["memory.mem_len=128", *overrides])
    L.seed_everything(config.seed)
    trainer = L.Trainer(
        max_steps=config.trainer.max_steps,
        max_epochs=-1,
        val_check_interval=50,  # batches, across epochs
        check_val_every_n_epoch=None,
        limit_val_batches=20,
        enable_model_summary=False,
    )
    trainer.fit(TransformerXLModule(config), TextDataModule(config))
    return trainer


if __name__ == "__main__":
    main(["trainer.max_steps=200"])
