"""`save_pretrained`, `from_pretrained` and `push_to_hub`, in Hugging Face's way of keeping a model in a folder:

model.safetensors   every weight once, tied ones under their first name
config.json         our groups `model`, `memory` and `eval`, and `data.segment_len`; no path of the writer's machine
vocab.json          the vocabulary, if the model knows it
README.md           the model card, with the settings that a score depends on
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import ModelCard, ModelCardData, PyTorchModelHubMixin, hf_hub_download
from huggingface_hub.errors import EntryNotFoundError
from safetensors.torch import load_file, save_file
from torch import nn

from txl_lightning.config import Config, ConfigError
from txl_lightning.model.weights import load_weights, tied_names

WEIGHTS, SETTINGS, VOCAB = "model.safetensors", "config.json", "vocab.json"

Model = TypeVar("Model", bound="HubModel")


class HubModel(PyTorchModelHubMixin, library_name="txl-lightning", tags=["transformer-xl"]):
    """What a model needs to be kept in a folder or on the Hub. Its class takes a `Config` as its first argument.

    Attributes:
        run_config: the whole configuration it was built with.
        vocab: its vocabulary as checkpoints hold it (`vocab.from_dict` makes it again); None: not known.
    """

    run_config: Config
    vocab: Mapping[str, Any] | None = None

    def generate_model_card(self, *args: Any, **kwargs: Any) -> ModelCard:
        """The card: what the model is, the settings that its scores depend on, and how to load it.

        Args:
            kwargs: more of the card's data, such as license="mit" or language="en".
        """
        tags = ["transformer-xl", "pytorch_model_hub_mixin", *kwargs.pop("tags", ())]
        data = ModelCardData(**{"library_name": "txl-lightning", "tags": tags, **kwargs})
        lines = "\n".join(f"| `{name}` | {value} |" for name, value in settings(self.run_config, self.vocab).items())
        return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{_CARD.format(settings=lines)}")

    def _save_pretrained(self, save_directory: Path) -> None:
        assert isinstance(self, nn.Module)
        again = tied_names(self)
        weights = {name: tensor.contiguous() for name, tensor in self.state_dict().items() if name not in again}
        save_file(weights, save_directory / WEIGHTS, metadata={"format": "pt"})
        (save_directory / SETTINGS).write_text(json.dumps(to_json(self.run_config), indent=2) + "\n", encoding="utf-8")
        (save_directory / VOCAB).unlink(missing_ok=True)
        if self.vocab is not None:
            (save_directory / VOCAB).write_text(json.dumps(self.vocab), encoding="utf-8")

    @classmethod
    def _from_pretrained(cls: type[Model], *, model_id: str, **options: Any) -> Model:
        config = from_json(options.pop("config", None), source=model_id)
        map_location = options.pop("map_location", "cpu")
        options.pop("strict", None)  # always
        if (file := _file(model_id, WEIGHTS, options)) is None:
            raise ConfigError("from_pretrained", model_id, f"it has no {WEIGHTS}", "name what save_pretrained wrote")
        weights = load_file(file)
        model = cls(config)
        assert isinstance(model, nn.Module)
        first = tied_names(model)
        weights |= {name: weights[first[name]] for name in first if first[name] in weights}
        load_weights(model.to(next(iter(weights.values())).dtype), weights, path=model_id, key="from_pretrained")
        if (vocab := _file(model_id, VOCAB, options)) is not None:
            model.vocab = json.loads(Path(vocab).read_text(encoding="utf-8"))
        return model.to(map_location).eval()


def to_json(config: Config) -> dict[str, Any]:
    """The part of a configuration that weights and scores depend on, as plain containers."""
    evaluation = {"batch_size": config.eval_batch_size, "segment_len": config.eval_segment_len}
    sections = {"model": config.model.to_dict(), "memory": config.memory.to_dict(), "eval": evaluation}
    return {"library": "txl-lightning", **sections, "data": {"segment_len": config.data.segment_len}}


def from_json(values: Any, *, source: str) -> Config:
    """The configuration of a folder.

    Raises:
        ConfigError: it is missing, or none of ours.
    """
    if isinstance(values, Config):
        return values
    if not isinstance(values, Mapping) or not isinstance(values.get("model"), Mapping):
        kind = values.get("model_type") if isinstance(values, Mapping) else None
        rule = f"its {SETTINGS} is " + ("missing" if values is None else f"none of ours ({kind or 'unknown'})")
        cure = "read models of other codes with txl import, or from_reference"
        raise ConfigError("from_pretrained", source, rule, cure)
    given = {name: values[name] for name in ("model", "memory", "eval") if name in values}
    return Config.from_dict({**given, "data": {"name": Config().data.name, **values.get("data", {})}})


def settings(config: Config, vocab: Mapping[str, Any] | None) -> dict[str, str]:
    """By dotted key, all that a score depends on beside weights and text."""
    model, memory = config.model, config.memory.to_dict()
    told = f"{vocab['name']}, {model.vocab_size} ids" if vocab else f"{model.vocab_size} ids; their meaning is not kept"
    return {
        "eval.segment_len": str(config.eval_segment_len),
        "memory": ", ".join(f"{name}={value}" for name, value in memory.items()),
        "memory.mem_len": str(memory.get("mem_len", 0)),
        "model.clamp_len": str(model.clamp_len),
        "model.same_length": f"{str(model.same_length).lower()} ({model.same_length_rule} keys)",
        "model.position": model.position,
        "vocabulary": told,
        "parameters": f"{model.num_params():,}, without those of the memory",
    }


def _file(model_id: str, name: str, options: Mapping[str, Any]) -> str | None:
    """A file of a folder or of the Hub; None if it has none of that name."""
    if Path(model_id).is_dir():
        file = Path(model_id) / name
        return str(file) if file.is_file() else None
    try:
        return hf_hub_download(repo_id=model_id, filename=name, **options)
    except EntryNotFoundError:
        return None


_CARD = """# Transformer-XL with a memory

A language model that reads a text segment by segment and carries a memory, trained with txl-lightning.

## Evaluation settings

Scores hold for these settings only.

| setting | value |
|---|---|
{settings}

## Use

```python
from txl_lightning import TransformerXL

model = TransformerXL.from_pretrained("FOLDER-OR-REPOSITORY")
state = model.init_state(1, form="projected")
out = model(tokens_BT, state, targets_BT=targets_BT)  # out.losses_BT in nats; out.state goes into the next segment
```
"""
