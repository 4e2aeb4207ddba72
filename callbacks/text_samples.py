"""What the model writes, after every validation."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as L
import torch

from txl_lightning import registry
from txl_lightning.build import document_end
from txl_lightning.config import ConfigError, Section, key
from txl_lightning.generation import Session
from txl_lightning.sampling import SamplingRule
from txl_lightning.training.datamodule import TextDataModule


@dataclass(frozen=True, kw_only=True)
class TextSamplesConfig(Section):
    """Keys of `callbacks.text_samples`."""

    section = "callbacks.text_samples"

    prompt_tokens: int = key(128, "tokens of the validation split that the sample continues", minimum=1)
    tokens: int = key(128, "tokens to sample", minimum=1)
    temperature: float = key(0.8, "divides the logits; 0: always the likeliest token", minimum=0)


@registry.callbacks.register("text_samples", config=TextSamplesConfig)
class TextSamples(L.Callback):
    """Logs after each validation, from rank 0:

    samples/text   the beginning of the validation split and how the model goes on, with its memory; not under ZeRO 3,
                   where no rank has all of the weights
    """

    def __init__(self, config: TextSamplesConfig) -> None:
        self.config = config
        self._whole = True  # whether rank 0 has all of the weights

    def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        if not isinstance(trainer.datamodule, TextDataModule):  # type: ignore[attr-defined]
            cure = "fit with TextDataModule or leave the callback out"
            raise ConfigError("callbacks", "text_samples", "needs the corpus to take its prompt from", cure)
        self._whole = pl_module.config.strategy.stage != 3
        if not self._whole and trainer.is_global_zero:
            print("text_samples: ranks hold shares of the weights (ZeRO 3), so none are written", file=sys.stderr)

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        if trainer.sanity_checking or not trainer.is_global_zero or not trainer.loggers or not self._whole:
            return
        data = trainer.datamodule.data  # type: ignore[attr-defined]
        prompt = data.require("valid")[: self.config.prompt_tokens].tolist()
        sampled = self._sample(pl_module, prompt, separator=document_end(data.vocab))
        text = data.vocab.decode(prompt) + " ⟶ " + data.vocab.decode(sampled)
        pl_module.log_text(tag="samples/text", text="\n".join(f"    {line}" for line in text.splitlines()))

    def _sample(self, module: Any, prompt: list[int], *, separator: int | None = None) -> list[int]:
        training = module.model.training
        module.model.eval()
        session = Session(module.model, segment_len=module.config.data.segment_len, separator=separator)
        session.feed(prompt)
        generator = torch.Generator().manual_seed(module.config.seed)  # its own: training's stays untouched
        rule = SamplingRule(temperature=self.config.temperature)
        tokens = list(session.sample(self.config.tokens, rule=rule, generator=generator))
        module.model.train(training)
        return tokens
