"""An LSTM of your own on our lanes: LaneState keeps its state apart per stage, resets it, and saves it."""

import lightning.pytorch as L
import torch
from torch import nn

from txl_lightning import LaneState, TextDataModule
from txl_lightning.config import load
from txl_lightning.training.lane_state import stage_of


class LSTM(L.LightningModule):
    def __init__(self, vocab_size: int, width: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab_size)
        self.lanes = LaneState()

    def fresh(self, lanes: int) -> dict[str, torch.Tensor]:
        zeros = torch.zeros(lanes, self.lstm.hidden_size, device=self.device)
        return {"h": zeros, "c": zeros}

    def step(self, batch, stage: str) -> torch.Tensor:
        state = self.lanes.read(stage, batch, self.fresh)
        out, (h, c) = self.lstm(self.embedding(batch.tokens_BT), (state["h"][None], state["c"][None]))
        self.lanes.propose(stage, {"h": h[0], "c": c[0]}, batch)
        loss_BT = nn.functional.cross_entropy(self.head(out).mT, batch.targets_BT, reduction="none")
        return (loss_BT * batch.segment.mask(loss_BT.shape[1])).sum() / batch.n_target

    def training_step(self, batch, batch_idx: int) -> torch.Tensor:
        return self.step(batch, "train")

    def validation_step(self, batch, batch_idx: int) -> None:
        stage = stage_of(self.trainer)
        self.log("val/loss", self.step(batch, stage), on_epoch=True, batch_size=batch.n_target)
        self.lanes.commit(stage)

    def on_after_backward(self) -> None:
        self.lanes.commit("train")

    def on_train_start(self) -> None:
        self.lanes.seek(self.trainer.train_dataloader)

    def on_save_checkpoint(self, checkpoint: dict) -> None:
        checkpoint["lanes"] = self.lanes.state_dict()

    def on_load_checkpoint(self, checkpoint: dict) -> None:
        self.lanes.load_state_dict(checkpoint["lanes"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def main(overrides: list[str]) -> L.Trainer:
    config = load(overrides)
    trainer = L.Trainer(max_steps=config.trainer.max_steps, val_check_interval=50, check_val_every_n_epoch=None)
    trainer.fit(LSTM(config.model.vocab_size), TextDataModule(config))
    return trainer


if __name__ == "__main__":
    main(["trainer.max_steps=200"])
