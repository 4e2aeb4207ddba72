"""What the authors', NVIDIA's and Hugging Face's configurations say, in our keys and back.

Weights and configuration do not tell everything: where memory starts, which keys `same_length` leaves visible and which
row of the cluster weights is which tail are settled by the code that reads them, that is, by the layout.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from txl_lightning.config import Config, ConfigError
from txl_lightning.errors import suggest

ATTN_TYPES = ("transformer_xl", "shaw", "absolute", "absolute_per_layer")
"""`model.position` of each attn_type."""

RECORD = "txl_lightning"
"""Key of an exported configuration: those of our settings that its layout has no key for. Other code ignores it."""

RECORDED = ("memory.cold", "model.cluster_order", "model.same_length_rule", "data.segment_len")

REQUIRED = object()


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One family of files.

    Attributes:
        name: what `layout=` says.
        prefix: of every weight but those of the softmax.
        same_length_rule, cluster_order, cold: the conventions of its code, as our keys call them.
        keys: its names for our model keys, with their defaults.
        ignored: keys that change no number at evaluation.
        attn_types: how many of ATTN_TYPES it has.
        unties: it can give each layer its own u and v.
    """

    name: str
    prefix: str = ""
    same_length_rule: str = "mem_len"
    cluster_order: str = "reversed"
    cold: str = "absent"
    keys: Mapping[str, tuple[str, Any]]
    ignored: frozenset[str]
    attn_types: int = 4
    unties: bool = False

    def refuse(self, key: str, value: object, rule: str, cure: str) -> ConfigError:
        return ConfigError(f"config.{key}", value, rule, cure)


_SIZES = {name: (name, REQUIRED) for name in ("n_layer", "n_head", "d_model", "d_head", "d_inner")}
_KEYS: dict[str, tuple[str, Any]] = {
    **_SIZES,
    "dropout": ("dropout", 0.0),
    "dropatt": ("dropatt", 0.0),
    "pre_lnorm": ("pre_norm", False),
    "cutoffs": ("cutoffs", ()),
    "div_val": ("div_val", 1),
    "d_embed": ("d_embed", None),
    "clamp_len": ("clamp_len", -1),
    "same_length": ("same_length", False),
}
_AUTHORS = {**_KEYS, "n_token": ("vocab_size", REQUIRED), "tie_weight": ("tie_weights", True)}
_MANY = ("cutoffs", "div_val", "d_embed", "clamp_len", "same_length", "pre_lnorm")  # other defaults there
_HUGGINGFACE = {
    **_KEYS,
    **{name: (_KEYS[name][0], REQUIRED) for name in _MANY},
    "vocab_size": ("vocab_size", REQUIRED),
    "tie_word_embeddings": ("tie_weights", True),
    "untie_r": ("untie_r", REQUIRED),
    "layer_norm_epsilon": ("norm_eps", 1e-5),
}
_NOTES = frozenset({"producer", "batch", "note", "dtype", "adapt_inp"})
_TRANSFORMERS = frozenset(
    "adaptive init init_range init_std proj_init_std model_type architectures transformers_version torch_dtype "
    "_name_or_path name_or_path _attn_implementation_autoset bos_token_id eos_token_id pad_token_id sep_token_id "
    "cls_token_id mask_token_id decoder_start_token_id tokenizer_class prefix task_specific_params return_dict "
    "return_dict_in_generate output_hidden_states output_attentions output_scores use_cache use_bfloat16 torchscript "
    "tf_legacy_loss pruned_heads chunk_size_feed_forward is_encoder_decoder is_decoder add_cross_attention "
    "cross_attention_hidden_size tie_encoder_decoder finetuning_task problem_type id2label label2id num_labels "
    "max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k "
    "top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size "
    "bad_words_ids num_return_sequences forced_bos_token_id forced_eos_token_id remove_invalid_values "
    "exponential_decay_length_penalty suppress_tokens begin_suppress_tokens proj_share_all_but_first".split()
)

LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout(name="authors", keys=_AUTHORS, ignored=_NOTES),
        Layout(name="nvidia", keys=_AUTHORS, ignored=_NOTES, same_length_rule="mem_len+1"),
        Layout(
            name="huggingface",
            prefix="transformer.",
            cluster_order="ascending",
            cold="zeros",
            keys=_HUGGINGFACE,
            ignored=_NOTES | _TRANSFORMERS,
            attn_types=1,
            unties=True,
        ),
    )
}


def layout_named(name: str) -> Layout:
    """Raises ConfigError if there is none of that name."""
    if name not in LAYOUTS:
        raise ConfigError("layout", name, "no such layout", suggest(str(name), LAYOUTS))
    return LAYOUTS[name]


def to_ours(given: Mapping[str, Any], layout: Layout, *, max_distance: int | None = None) -> Config:
    """Our configuration of a model of another code, with that code's conventions.

    Args:
        given: its configuration as JSON.
        layout: whose.
        max_distance: learned rows that its weights hold, if any.

    Raises:
        ConfigError: a key is missing, unknown or of no use here; named as config.KEY.
    """
    if not isinstance(given, Mapping):
        raise ConfigError("config", type(given).__name__, "must be a group of keys", "give the JSON object")
    rest = {name: value for name, value in given.items() if name not in layout.ignored}
    share = given.get("proj_share_all_but_first", False)
    record = rest.pop(RECORD, {})
    _rename(rest, layout)
    model = {ours: _take(rest, theirs, layout, default) for theirs, (ours, default) in layout.keys.items()}
    model["clamp_len"] = model["clamp_len"] if (model["clamp_len"] or 0) > 0 else -1
    model["cutoffs"] = list(model["cutoffs"] or ())
    model["cluster_order"], model["same_length_rule"] = layout.cluster_order, layout.same_length_rule
    model["tie_projs"] = _tie_projs(rest.pop("tie_projs", None), len(model["cutoffs"]), layout, share=bool(share))
    mem_len = _take(rest, "mem_len", layout, REQUIRED) or 0
    model |= _position(rest, layout, mem_len=mem_len, pre_norm=model["pre_norm"], max_distance=max_distance)
    if model["position"] == "absolute_per_layer":
        model["clamp_len"] = -1  # its code does not look at it there
    segment_len = rest.pop("tgt_len", None)
    _refuse_rest(rest, layout)
    values: dict[str, Any] = {"model": model, "memory": {"name": "cache", "mem_len": mem_len, "cold": layout.cold}}
    values["data"] = {"name": Config().data.name, **({"segment_len": segment_len} if segment_len else {})}
    for name, value in record.items():
        if name not in RECORDED:
            raise layout.refuse(f"{RECORD}.{name}", value, "no such key", suggest(name, RECORDED))
        section, _, key = name.partition(".")
        values[section][key] = value
    return Config.from_dict(values)


def to_theirs(config: Config, layout: Layout) -> dict[str, Any]:
    """The configuration as another code writes it.

    Raises:
        ConfigError: it has no words for the model; the message names our key.
    """
    model, memory = config.model, config.memory
    _check_sayable(config, layout)
    mem_len = getattr(memory, "mem_len", 0)
    values = {theirs: getattr(model, ours) for theirs, (ours, _) in layout.keys.items()}
    values |= {
        "d_embed": model.embed_width,
        "cutoffs": list(model.cutoffs),
        "tie_projs": list(model.tie_projs) or [False] * model.n_cluster,
        "mem_len": mem_len,
        "ext_len": 0,
        "attn_type": ATTN_TYPES.index(model.position),
        "tgt_len": config.data.segment_len,
        "sample_softmax": -1,
    }
    if model.position in ("shaw", "absolute_per_layer"):
        values["tgt_len"] = model.max_distance - mem_len  # their code makes tgt_len + ext_len + mem_len rows
    if layout.name == "huggingface":
        values |= {"model_type": "transfo-xl", "architectures": ["TransfoXLLMHeadModel"], "adaptive": True}
        values["proj_share_all_but_first"] = values["tie_projs"] == [False] + [True] * len(model.cutoffs)
    record = {name: _at(config, name) for name in RECORDED if _at(config, name) is not None}
    implied = {
        "memory.cold": layout.cold,
        "model.cluster_order": layout.cluster_order,
        "model.same_length_rule": layout.same_length_rule,
        "data.segment_len": values["tgt_len"],
    }
    values[RECORD] = {name: value for name, value in record.items() if value != implied[name]}
    return values if values[RECORD] else {name: value for name, value in values.items() if name != RECORD}


def differences(given: Mapping[str, Any], layout: Layout) -> list[str]:
    """In which of our conventions an exported model differs from what the layout's own code does, in words."""
    record = given.get(RECORD, {})
    notes = []
    if "memory.cold" in record and given["mem_len"]:
        notes.append(f"its code starts with memory.cold={layout.cold}, this model with {record['memory.cold']}")
    if "model.same_length_rule" in record and given["same_length"]:
        rule = record["model.same_length_rule"]
        notes.append(f"its same_length shows {layout.same_length_rule} keys, that of this model {rule}")
    return notes


def _at(config: Config, dotted: str) -> Any:
    section, _, key = dotted.partition(".")
    return getattr(getattr(config, section), key, None)


def _rename(rest: dict[str, Any], layout: Layout) -> None:
    """Second names of Hugging Face's keys; both may be there if they agree."""
    if layout.name != "huggingface":
        return
    for second, first in (("n_token", "vocab_size"), ("tie_weight", "tie_word_embeddings")):
        if second in rest:
            value = rest.pop(second)
            if rest.setdefault(first, value) != value:
                raise layout.refuse(second, value, f"{first}={rest[first]} says otherwise", "keep one of them")


def _take(rest: dict[str, Any], name: str, layout: Layout, default: Any) -> Any:
    value = rest.pop(name, default)
    if value is REQUIRED:
        raise layout.refuse(name, None, f"is missing in a configuration of layout {layout.name}", "add it")
    return value


def _tie_projs(given: Any, n_cutoff: int, layout: Layout, *, share: bool) -> list[bool]:
    """One truth value for each cluster: their code reads missing ones as false."""
    if given is None:
        return [False] + [share] * n_cutoff
    if not isinstance(given, (list, tuple)) or not all(isinstance(tie, bool) for tie in given):
        raise layout.refuse("tie_projs", given, "must be a list of true and false", "give one for each cluster")
    ties = list(given)
    if any(ties[n_cutoff + 1 :]):
        raise layout.refuse("tie_projs", ties, f"there are {n_cutoff + 1} clusters", "give one for each cluster")
    return (ties + [False] * (n_cutoff + 1))[: n_cutoff + 1]


def _position(
    rest: dict[str, Any], layout: Layout, *, mem_len: int, pre_norm: bool, max_distance: int | None
) -> dict[str, Any]:
    """The model keys that follow from attn_type."""
    kind = rest.pop("attn_type", 0)
    if isinstance(kind, bool) or kind not in range(layout.attn_types):
        known = ", ".join(map(str, range(layout.attn_types)))
        raise layout.refuse("attn_type", kind, f"layout {layout.name} has {known}", "correct it")
    if kind >= 2 and mem_len:
        rule = (
            f"attn_type={kind} numbers the tokens of one segment, so it cannot say where a memory's tokens stand; "
            "the original adds positions to its memory again in every segment, or fails"
        )
        raise layout.refuse("mem_len", mem_len, rule, "set it to 0: the weights are the same")
    found: dict[str, Any] = {"position": ATTN_TYPES[kind]}
    if kind >= 2 and pre_norm:
        found["norm_queries"] = False  # there only keys and values are normalised
    if kind in (1, 3) and max_distance is not None:
        found["max_distance"] = max_distance
    return found


def _refuse_rest(rest: dict[str, Any], layout: Layout) -> None:
    """Keys that must be off, and keys that nobody knows."""
    if rest.pop("ext_len", 0):
        rule = "the last ext_len tokens would be read twice; here every token is read once"
        raise layout.refuse("ext_len", "> 0", rule, "set it to 0: the weights are the same")
    if (rest.pop("sample_softmax", -1) or -1) > 0:
        rule = "a sampled softmax is not built here"
        raise layout.refuse("sample_softmax", "> 0", rule, "give a model with the full softmax")
    if not layout.unties and rest.pop("untie_r", False):
        raise layout.refuse("untie_r", True, f"layout {layout.name} has one pair u, v", "correct it")
    for name, value in rest.items():
        known = [*layout.keys, "mem_len", "tgt_len", "ext_len", "attn_type", "tie_projs", "sample_softmax"]
        raise layout.refuse(str(name), value, f"no such key in layout {layout.name}", suggest(str(name), known))


def _check_sayable(config: Config, layout: Layout) -> None:
    """Refuse to export what the layout has no words for."""
    model, memory = config.model, config.memory
    told = ATTN_TYPES[: layout.attn_types]
    queries = not (model.pre_norm and model.position.startswith("absolute"))
    wanted: list[tuple[str, Any, Any]] = [
        ("model.architecture", model.architecture, ("transformer",)),
        ("model.position", model.position, told),
        ("model.terms", model.terms, (("a", "b", "c", "d"),)),
        ("model.norm", model.norm, ("layernorm",)),
        ("model.norm_eps", model.norm_eps, (1e-5,) if "layer_norm_epsilon" not in layout.keys else (model.norm_eps,)),
        ("model.norm_queries", model.norm_queries, (queries,)),
        ("model.final_norm", model.final_norm, (False,)),
        ("model.ffn", model.ffn, ("relu",)),
        ("model.bias", model.bias, (True,)),
        ("model.qk_norm", model.qk_norm, (False,)),
        ("model.n_kv_head", model.kv_heads, (model.n_head,)),
        ("memory.name", memory.name, ("cache", "none")),
    ]
    if memory.name == "cache":
        indices = memory.layer_indices(model.n_layer)  # type: ignore[attr-defined]
        wanted.append(("memory.layers", indices, (list(range(model.n_layer)),)))
    for key, value, sayable in wanted:
        if value not in sayable:
            rule = f"layout {layout.name} cannot say it"
            raise ConfigError(key, value, rule, f"it has {' or '.join(map(str, sayable))} only")
    _check_rows(config, layout)


def _check_rows(config: Config, layout: Layout) -> None:
    """Learned rows must have the shape that the other code gives them."""
    model, mem_len = config.model, getattr(config.memory, "mem_len", 0)
    if model.position not in ("shaw", "absolute_per_layer"):
        return
    if model.max_distance <= mem_len:
        rule = f"layout {layout.name} has tgt_len + mem_len rows, and memory.mem_len={mem_len} alone needs as many"
        raise ConfigError("model.max_distance", model.max_distance, rule, "lower memory.mem_len")
    per_head = model.position == "absolute_per_layer" and layout.name == "authors"
    if per_head and model.n_head * model.d_head != model.d_model:
        rule = "layout authors keeps these rows by head, as wide as the model in all"
        raise ConfigError("model.d_head", model.d_head, rule, "nothing can be done about trained weights")


def replace_lengths(config: Config, given: Config) -> Config:
    """`config` with the model, memory and segment length of another."""
    data = dataclasses.replace(config.data, segment_len=given.data.segment_len)
    return dataclasses.replace(config, model=given.model, memory=given.memory, data=data)
