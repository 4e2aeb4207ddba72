"""Names, shapes and order of weights: the authors', NVIDIA's and Hugging Face's, in ours and back.

A rule says which of our weights hold the same numbers as which of theirs. The rules of one model are one list, read in
both directions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from txl_lightning.checkpoints.conventions import Layout
from txl_lightning.config import ConfigError, ModelConfig
from txl_lightning.errors import suggest
from txl_lightning.model.positions import frequencies

Convert = Callable[[list[Tensor]], list[Tensor]]


def _same(tensors: list[Tensor]) -> list[Tensor]:
    return tensors


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Weights of ours and of theirs that hold the same numbers; `pull` makes ours of theirs, `push` theirs of ours."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    pull: Convert = _same
    push: Convert = _same


_LAYER = {
    "attention.out": "dec_attn.o_net",
    "attention_norm": "dec_attn.layer_norm",
    "feed_forward.0": "pos_ff.CoreNet.0",
    "feed_forward.3": "pos_ff.CoreNet.3",
    "feed_forward_norm": "pos_ff.layer_norm",
}


def rules(config: ModelConfig, layout: Layout) -> list[Rule]:
    """All of a model, each of their weights once (see `aliases` for their further names)."""
    found = [*_table_rules(config, layout), *_softmax_rules(config, layout), *_position_rules(config, layout)]
    for n in range(config.n_layer):
        theirs = f"{layout.prefix}layers.{n}."
        for our_part, their_part in _LAYER.items():
            kinds = ("weight",) if our_part == "attention.out" else ("weight", "bias")
            found += [_copy(f"layers.{n}.{our_part}.{kind}", f"{theirs}{their_part}.{kind}") for kind in kinds]
        found.append(_qkv_rule(config, f"layers.{n}.attention.qkv.weight", f"{theirs}dec_attn."))
    return found


def aliases(config: ModelConfig, layout: Layout) -> dict[str, str]:
    """Further names of theirs for a tied weight, to the name that has a rule. Real files may lack them."""
    word_emb, tables = f"{layout.prefix}word_emb.", range(1 if config.div_val == 1 else config.n_cluster)
    found = {}
    for i in range(config.n_cluster):
        if _has_projection(config) and _ties(config, i):
            first = 0 if config.div_val == 1 else i
            found[f"crit.out_projs.{i}"] = f"{word_emb}emb_projs.{first}"
    for i in tables:
        if config.tie_weights:
            found[_out_weight(i, layout)] = f"{word_emb}emb_layers.{i}.weight"
        if layout.name == "nvidia" and _has_projection(config):
            found[f"crit.shared_out_projs.{i}"] = f"{word_emb}emb_projs.{i}"
    if layout.unties and not config.untie_r:
        for n in range(config.n_layer):
            for name in ("r_w_bias", "r_r_bias"):
                found[f"{layout.prefix}layers.{n}.dec_attn.{name}"] = f"{layout.prefix}{name}"
    return found


def pull(
    state: Mapping[str, Tensor], config: ModelConfig, layout: Layout, own: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Our weights, made of theirs.

    Args:
        state: theirs, tied ones under one or more of their names.
        config: of our model, as the layout's configuration gives it.
        layout: whose names they are.
        own: our weights, for their shapes.

    Raises:
        ConfigError: a key is missing, unknown or of another shape, or tied weights differ; the message names it.
    """
    known = rules(config, layout)
    rest = _without_aliases(dict(state), aliases(config, layout))
    _check_frequencies(rest, config, layout)
    names = [name for rule in known for name in rule.theirs]
    _check_names(rest, names, layout, looks=_looks_like(state))
    weights: dict[str, Tensor] = {}
    for rule in known:
        shapes = [tensor.shape for tensor in rule.push([own[name].to("meta") for name in rule.ours])]
        for name, shape in zip(rule.theirs, shapes, strict=True):
            _check_tensor(name, rest[name], shape, layout)
        weights.update(zip(rule.ours, rule.pull([rest[name] for name in rule.theirs]), strict=True))
    return weights


def push(weights: Mapping[str, Tensor], config: ModelConfig, layout: Layout) -> dict[str, Tensor]:
    """Their weights, made of ours; tied ones under each name that their own files have.

    Raises:
        ConfigError: layers have different biases u and v, and the layout has one pair for all.
    """
    state: dict[str, Tensor] = {}
    kind = weights["embedding.tables.0.weight"]
    for rule in rules(config, layout):
        theirs = [tensor.to(kind) for tensor in rule.push([weights[name] for name in rule.ours])]
        state.update(zip(rule.theirs, theirs, strict=True))
    for name, first in aliases(config, layout).items():
        if layout.name != "nvidia" or name.startswith("crit.shared_out_projs."):
            state[name] = state[first]
    if name := _frequency_name(config, layout):
        state[name] = frequencies(config.d_model, device=kind.device).to(kind.dtype)
    return state


def _copy(ours: str, theirs: str) -> Rule:
    return Rule(ours=(ours,), theirs=(theirs,))


def _flipped(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.flip(0) for tensor in tensors]


def _has_projection(config: ModelConfig) -> bool:
    """Whether their clusters have projections (ours may lack one: `proj_same_dim`)."""
    return config.div_val > 1 or config.embed_width != config.d_model


def _ties(config: ModelConfig, cluster: int) -> bool:
    return bool(config.tie_projs) and config.tie_projs[cluster]


def _out_weight(cluster: int, layout: Layout) -> str:
    name = "out_layers_weights.{}" if layout.name == "nvidia" else "out_layers.{}.weight"
    return f"crit.{name.format(cluster)}"


def _table_rules(config: ModelConfig, layout: Layout) -> Iterator[Rule]:
    word_emb = f"{layout.prefix}word_emb."
    for i in range(1 if config.div_val == 1 else config.n_cluster):
        yield _copy(f"embedding.tables.{i}.weight", f"{word_emb}emb_layers.{i}.weight")
        if _has_projection(config):
            yield _projection_rule(config, i, f"embedding.projections.{i}", f"{word_emb}emb_projs.{i}")


def _softmax_rules(config: ModelConfig, layout: Layout) -> Iterator[Rule]:
    bias = "crit.out_layers_biases.{}" if layout.name == "nvidia" else "crit.out_layers.{}.bias"
    for i in range(1 if config.div_val == 1 else config.n_cluster):
        yield _copy(f"softmax.biases.{i}", bias.format(i))
        if not config.tie_weights:
            yield _copy(f"softmax.weights.{i}", _out_weight(i, layout))
    for i in range(config.n_cluster):
        if _has_projection(config) and not _ties(config, i):
            yield _projection_rule(config, i, f"softmax.projections.{i}", f"crit.out_projs.{i}")
    convert = _same if config.cluster_order == layout.cluster_order else _flipped
    for name in ("cluster_weight", "cluster_bias") if config.cutoffs else ():
        yield Rule(ours=(f"softmax.{name}",), theirs=(f"crit.{name}",), pull=convert, push=convert)


def _projection_rule(config: ModelConfig, cluster: int, ours: str, theirs: str) -> Rule:
    """A copy; where ours has none (`proj_same_dim`) theirs is the identity."""
    if config.projects(cluster):
        return _copy(ours, theirs)
    return Rule(ours=(), theirs=(theirs,), push=lambda _: [torch.eye(config.d_model)])


def _qkv_rule(config: ModelConfig, ours: str, theirs: str) -> Rule:
    if not config.position.startswith("absolute"):
        return _copy(ours, f"{theirs}qkv_net.weight")
    inner = config.n_head * config.d_head
    return Rule(
        ours=(ours,),
        theirs=(f"{theirs}q_net.weight", f"{theirs}kv_net.weight"),
        pull=lambda parts: [torch.cat(parts)],
        push=lambda joined: [part.clone() for part in joined[0].split([inner, 2 * inner])],
    )


def _position_rules(config: ModelConfig, layout: Layout) -> Iterator[Rule]:
    layers = [f"layers.{n}.attention.position." for n in range(config.n_layer)]
    if config.position == "transformer_xl":
        for n, ours in enumerate(layers):
            yield _copy(f"{ours}r.weight", f"{layout.prefix}layers.{n}.dec_attn.r_net.weight")
        yield from _pair_rules(config, layout, layers)
    if config.position == "shaw":
        for name, theirs in (("rows", "r_emb"), ("u", "r_w_bias"), ("row_bias", "r_bias")):
            yield _stack([f"{ours}{name}" for ours in layers], theirs)
    if config.position == "absolute_per_layer":
        per_head = (config.n_head, config.d_head) if layout.name == "authors" else None
        yield _stack([f"{ours}rows" for ours in layers], "r_emb", per_head=per_head)


def _pair_rules(config: ModelConfig, layout: Layout, layers: list[str]) -> Iterator[Rule]:
    for name, theirs in (("u", "r_w_bias"), ("v", "r_r_bias")):
        if not config.untie_r:
            yield _copy(name, f"{layout.prefix}{theirs}")
        elif layout.unties:
            for n, ours in enumerate(layers):
                yield _copy(f"{ours}{name}", f"{layout.prefix}layers.{n}.dec_attn.{theirs}")
        else:
            ours_of_all = tuple(f"{ours}{name}" for ours in layers)
            yield Rule(ours=ours_of_all, theirs=(f"{layout.prefix}{theirs}",), push=lambda all_: [_one(all_, layout)])


def _one(tensors: list[Tensor], layout: Layout) -> Tensor:
    """The value that all layers share. Raises ConfigError if they do not."""
    if any(not torch.equal(tensor, tensors[0]) for tensor in tensors[1:]):
        rule = f"layers have different u and v, and layout {layout.name} has one pair for all"
        raise ConfigError("model.untie_r", True, rule, "export to layout huggingface")
    return tensors[0]


def _stack(ours: list[str], theirs: str, *, per_head: tuple[int, int] | None = None) -> Rule:
    """One tensor of theirs holds all layers; `per_head`: with its last dimension split."""

    def pull(tensors: list[Tensor]) -> list[Tensor]:
        return list((tensors[0] if per_head is None else tensors[0].flatten(2)).unbind())

    def push(tensors: list[Tensor]) -> list[Tensor]:
        whole = torch.stack(tensors)
        return [whole if per_head is None else whole.unflatten(2, per_head)]

    return Rule(ours=tuple(ours), theirs=(theirs,), pull=pull, push=push)


def _without_aliases(state: dict[str, Tensor], further: Mapping[str, str]) -> dict[str, Tensor]:
    """Every tied weight under its first name alone."""
    for name, first in further.items():
        if name not in state:
            continue
        tensor = state.pop(name)
        if first in state and not torch.equal(tensor, state[first]):
            rule = f"differs from {first}, with which the configuration ties it"
            raise ConfigError("state_dict", name, rule, "correct the configuration or the weights")
        state.setdefault(first, tensor)
    return state


def _frequency_name(config: ModelConfig, layout: Layout) -> str:
    """Empty if the model has no sinusoid."""
    return f"{layout.prefix}pos_emb.inv_freq" if config.position in ("transformer_xl", "absolute") else ""


def _check_frequencies(rest: dict[str, Tensor], config: ModelConfig, layout: Layout) -> None:
    """Take the sinusoid's frequencies out: they are a constant. Raises ConfigError if they are not that."""
    name = _frequency_name(config, layout)
    if name not in rest:
        return
    theirs, ours = rest.pop(name), frequencies(config.d_model, device=torch.device("cpu"))
    near = 1e-5 if theirs.dtype in (torch.float32, torch.float64) else 1e-2
    if theirs.shape != ours.shape or not torch.allclose(theirs.cpu().float(), ours, rtol=near, atol=0):
        rule = "are not the frequencies 10000^(-2i/d_model) of the paper"
        raise ConfigError("state_dict", name, rule, "such weights cannot be used here")


def _check_names(rest: Mapping[str, Tensor], names: list[str], layout: Layout, *, looks: str | None) -> None:
    extra = [name for name in rest if name not in names]
    missing = [name for name in names if name not in rest]
    if not extra and not missing:
        return
    odd, whole = (extra or missing)[0], f"a model of layout {layout.name} with this configuration"
    if looks not in (None, layout.name):
        rule = f"{odd} does not fit: keys are those of layout {looks}"
        raise ConfigError("layout", layout.name, rule, f"set layout={looks}")
    count = len(extra or missing)
    rule = f"is no weight of {whole}" if extra else f"is missing for {whole}"
    cure = suggest(odd, missing) if extra else ""
    cure = cure if cure.startswith("did you mean") else "correct the configuration"
    raise ConfigError("state_dict", odd, rule + (f" ({count} such keys)" if count > 1 else ""), cure)


def _looks_like(state: Mapping[str, Tensor]) -> str | None:
    """The layout whose own names are there."""
    marks = {"transformer.": "huggingface", "crit.out_layers_biases.": "nvidia", "crit.out_layers.": "authors"}
    found = (layout for mark, layout in marks.items() if any(name.startswith(mark) for name in state))
    return next(found, None)


def _check_tensor(name: str, tensor: Tensor, shape: torch.Size, layout: Layout) -> None:
    if tensor.shape != shape:
        rule = f"is {tuple(tensor.shape)}, but {tuple(shape)} in a model of layout {layout.name}"
        raise ConfigError("state_dict", name, f"{rule} with this configuration", "correct the configuration")
    if not tensor.is_floating_point():
        raise ConfigError("state_dict", name, f"holds {tensor.dtype}, not weights", "give the trained weights")
