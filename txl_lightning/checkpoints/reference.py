"""Models of other codes as ours, and ours as theirs: the authors' PyTorch code, NVIDIA's and Hugging Face's.

What decides numbers beside the weights (order of clusters, start of memory, same_length) follows from the layout and
stands in our configuration afterwards; see `conventions`. Batch first everywhere: theirs is time first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from txl_lightning.checkpoints import keys
from txl_lightning.checkpoints.conventions import layout_named, to_ours, to_theirs
from txl_lightning.config import Config, ConfigError
from txl_lightning.model.transformer import TransformerXL
from txl_lightning.model.weights import load_weights, tied_names


def from_reference(
    state_dict: Mapping[str, Tensor], config_dict: Mapping[str, Any], layout: str = "authors"
) -> TransformerXL:
    """A model of another code, with its conventions, in evaluation mode on the CPU.

    Args:
        state_dict: its weights, by its names; tied ones under one or more of them. Half precision becomes float32.
        config_dict: the arguments of its model, as JSON has them.
        layout: "authors" (kimiyoung/transformer-xl, PyTorch), "nvidia" (DeepLearningExamples) or "huggingface"
            (TransfoXLLMHeadModel).

    Raises:
        ConfigError: a key of the configuration or of the weights is unknown, missing or does not fit; it is named.
    """
    chosen = layout_named(layout)
    state = {str(name): _plain(str(name), weight) for name, weight in state_dict.items()}
    config = to_ours(config_dict, chosen, max_distance=_learned_rows(state))
    with torch.device("meta"):  # whatever size the configuration asks for
        shapes = TransformerXL(config).state_dict()
    weights = keys.pull(state, config.model, chosen, shapes)
    model = TransformerXL(config)
    if any(weight.dtype == torch.float64 for weight in state.values()):
        model = model.double()
    weights |= {name: weights[first] for name, first in tied_names(model).items()}
    load_weights(model, weights, path=layout, key="layout")
    return model.eval()


def to_reference(model: TransformerXL, layout: str = "authors") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A model of ours as another code keeps it: weights and configuration, which `from_reference` takes back.

    Conventions are converted: cluster rows are put into the layout's order, the pair u, v of all layers stands under
    each name it has there. What its code does otherwise and the weights cannot express, such as where memory starts, is
    kept in the configuration under a key of ours, so that the way back gives the very same losses.

    Args:
        model: its weights are not copied.
        layout: as in `from_reference`.

    Raises:
        ConfigError: the layout cannot say what the model is; the message names our key.
    """
    chosen = layout_named(layout)
    config: Config = model.run_config
    values = to_theirs(config, chosen)
    return keys.push(dict(model.state_dict()), config.model, chosen), values


def _plain(name: str, weight: Any) -> Tensor:
    """One weight on the CPU, without its graph. Raises ConfigError if it holds no real numbers one by one."""
    tensor = torch.as_tensor(weight).detach()
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_complex() or tensor.is_quantized:
        kind = f"a {tensor.layout} tensor of {tensor.dtype} on {tensor.device}"
        raise ConfigError("state_dict", name, f"is {kind}", "save it as a dense tensor of floating-point numbers")
    return tensor.cpu()


def _learned_rows(state: Mapping[str, Tensor]) -> int | None:
    """Rows of learned positions, which need not be those of the configuration: evaluation may use other lengths."""
    rows = state.get("r_emb")
    if rows is None:
        return None
    if rows.dim() < 3 or not rows.shape[1]:
        raise ConfigError("state_dict", "r_emb", f"is {tuple(rows.shape)}", "it has layers, rows and widths")
    return int(rows.shape[1])
