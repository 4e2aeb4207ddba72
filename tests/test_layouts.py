"""Other codes' configurations and weights: read with their conventions, refused by name, written and read again."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.theirs import Theirs, random_state
from txl_lightning import TransformerXL
from txl_lightning.checkpoints import from_reference, to_reference
from txl_lightning.checkpoints.conventions import differences, layout_named
from txl_lightning.config import Config, ConfigError

LAYOUTS = ("authors", "nvidia", "huggingface")

BASE: dict[str, Any] = {
    "n_layer": 2,
    "n_head": 2,
    "d_model": 12,
    "d_head": 6,
    "d_inner": 16,
    "d_embed": 12,
    "div_val": 1,
    "cutoffs": [8, 15],
    "tie_projs": [False, True, True],
    "pre_lnorm": False,
    "tgt_len": 4,
    "mem_len": 5,
    "same_length": False,
    "clamp_len": -1,
    "sample_softmax": -1,
    "attn_type": 0,
    "dropout": 0.1,
    "dropatt": 0.1,
}


def make(layout: str, **changes: Any) -> dict[str, Any]:
    """A small configuration of a layout."""
    own = {"n_token": 24, "tie_weight": True, "ext_len": 0}
    if layout == "huggingface":
        own = {"vocab_size": 24, "tie_word_embeddings": True, "untie_r": False}
    return {**BASE, **own, **changes}


def give(*layouts: str, **changes: Any) -> list[Any]:
    told = "-".join(f"{name}={value}".replace(" ", "") for name, value in changes.items()) or "base"
    return [pytest.param(layout, make(layout, **changes), id=f"{layout}-{told}") for layout in layouts]


LEARNED = ("authors", "nvidia")
CONFIGS = [
    *give(*LAYOUTS),
    *give(*LAYOUTS, pre_lnorm=True, same_length=True, mem_len=3),
    *give(*LAYOUTS, same_length=True, clamp_len=3),
    *give(*LAYOUTS, mem_len=0),
    *give(*LAYOUTS, cutoffs=[], tie_projs=[False]),
    *give(*LAYOUTS, cutoffs=[], tie_projs=[True], d_embed=8),
    *give(*LAYOUTS, cutoffs=[], tie_projs=[False], div_val=2),
    *give(*LAYOUTS, d_embed=8, tie_projs=[True, False, True]),
    *give(*LAYOUTS, div_val=2, d_embed=8, tie_projs=[True, True, False]),
    *give(*LAYOUTS, div_val=2, tie_projs=[False, False, False], cutoffs=[3, 23]),
    *give("authors", div_val=3, tie_projs=[True], d_head=5),
    *give("authors", d_embed=None, tie_projs=[False]),
    *give(*LEARNED, tie_weight=False, div_val=2),
    *give(*LEARNED, tie_weight=False, tie_projs=[False, True, False], d_embed=8),
    *give("huggingface", tie_word_embeddings=False, untie_r=True, layer_norm_epsilon=1e-3),
    *give("huggingface", untie_r=True, pre_lnorm=True, clamp_len=2),
    *give(*LEARNED, attn_type=1),
    *give(*LEARNED, attn_type=1, clamp_len=4, pre_lnorm=True, same_length=True),
    *give("authors", attn_type=1, clamp_len=1, d_head=5),
    *give("authors", attn_type=1, clamp_len=40),
    *give(*LEARNED, attn_type=2, mem_len=0),
    *give(*LEARNED, attn_type=2, mem_len=0, pre_lnorm=True, clamp_len=2),
    *give(*LEARNED, attn_type=3, mem_len=0),
    *give(*LEARNED, attn_type=3, mem_len=0, pre_lnorm=True, clamp_len=2, cutoffs=[], tie_projs=[]),
]


def stream(config: dict[str, Any], *, n_segment: int = 4) -> Tensor:
    """(B, N) with every border of a cluster among its tokens."""
    vocab = config.get("vocab_size", config.get("n_token"))
    tokens = torch.randint(vocab, (2, n_segment * config["tgt_len"] + 1), generator=torch.Generator().manual_seed(1))
    edges = [0, *(cut + by for cut in config["cutoffs"] for by in (-1, 0)), vocab - 1]
    tokens[0, 1 : len(edges) + 1] = torch.tensor(edges)
    return tokens


def losses(model: TransformerXL, tokens_BN: Tensor, *, n_token: int) -> Tensor:
    """(B, N - 1)."""
    state, found = model.init_state(len(tokens_BN)), []
    for start in range(0, tokens_BN.shape[1] - 1, n_token):
        part = tokens_BN[:, start : start + n_token + 1]
        with torch.no_grad():
            out = model(part[:, :-1], state, targets_BT=part[:, 1:])
        found.append(out.losses_BT)
        state = out.state
    return torch.cat(found, dim=1)


def as_json(values: Any) -> Any:
    return json.loads(json.dumps(values))


@pytest.mark.parametrize(("layout", "config"), CONFIGS)
def test_invented_models_give_their_own_code_s_losses_and_go_back(layout: str, config: dict[str, Any]) -> None:
    state, tokens = random_state(config, layout), stream(config)
    model = from_reference(state, config, layout)
    again, values = to_reference(model, layout)
    assert again.keys() == state.keys()
    assert all(torch.equal(again[name], state[name]) for name in state)
    same = ("n_layer", "cutoffs", "mem_len", "same_length", "attn_type", "pre_lnorm", "tgt_len", "div_val")
    assert {name: values[name] for name in same} == {name: config[name] for name in same}
    back = from_reference(again, as_json(values), layout)
    assert torch.equal(losses(back, tokens, n_token=4), losses(model, tokens, n_token=4))
    theirs, _ = Theirs(state, config, layout, torch.float64).run(tokens.T, 4)
    torch.testing.assert_close(losses(model.double(), tokens, n_token=4), torch.cat(theirs).T, atol=1e-9, rtol=0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_conventions_are_recorded(layout: str) -> None:
    model = from_reference(random_state(make(layout), layout), make(layout), layout)
    rule = "mem_len+1" if layout == "nvidia" else "mem_len"
    order = "ascending" if layout == "huggingface" else "reversed"
    assert (model.config.same_length_rule, model.config.cluster_order) == (rule, order)
    run = model.run_config
    assert run.memory.to_dict()["cold"] == ("zeros" if layout == "huggingface" else "absent")
    assert (run.memory.to_dict()["mem_len"], run.data.segment_len) == (5, 4)


OURS = {
    "default": {},
    "clusters": {"cutoffs": [8, 15], "div_val": 2, "tie_projs": [False, True, True], "clamp_len": 3},
    "narrow": {"cutoffs": [8, 15], "d_embed": 8, "tie_projs": [True, False, True]},
    "untied": {"cutoffs": [8], "tie_weights": False, "same_length": True, "same_length_rule": "mem_len+1"},
    "no projection": {"cutoffs": [8, 15], "div_val": 2, "proj_same_dim": False, "tie_projs": [True, True, False]},
    "pre_norm": {"pre_norm": True, "dropout": 0.1, "init_std": 0.3},
}


def our_model(*, memory: dict[str, Any] | None = None, seed: int = 0, **changes: Any) -> TransformerXL:
    sizes = {name: BASE[name] for name in ("n_layer", "n_head", "d_model", "d_head", "d_inner")}
    values = {"model": {**sizes, "vocab_size": 24, "init_std": 0.2, **changes}}
    values["memory"] = memory or {"name": "cache", "mem_len": 5}
    values["data"] = {"name": "stdlib", "segment_len": 4}
    torch.manual_seed(seed)
    model = TransformerXL(Config.from_dict(values)).eval()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OURS)
def test_our_models_come_back_bit_by_bit(name: str, layout: str) -> None:
    for memory in ({"name": "cache", "mem_len": 5, "cold": "absent"}, {"name": "cache", "mem_len": 3, "cold": "zeros"}):
        model = our_model(memory=memory, **OURS[name])
        state, values = to_reference(model, layout)
        back = from_reference(state, as_json(values), layout)
        tokens = stream({"vocab_size": 24, "tgt_len": 4, "cutoffs": model.config.cutoffs})
        assert torch.equal(losses(back, tokens, n_token=4), losses(model, tokens, n_token=4))
        assert back.run_config.memory == model.run_config.memory
        assert back.config.cluster_order == model.config.cluster_order


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_their_code_does_otherwise_is_said(layout: str) -> None:
    _, values = to_reference(our_model(same_length=True, same_length_rule="mem_len+1"), layout)
    notes = " ".join(differences(values, layout_named(layout)))
    assert ("memory.cold=zeros" in notes) == (layout == "huggingface")
    assert ("same_length" in notes) == (layout != "nvidia")


def test_exported_weights_run_in_the_other_code() -> None:
    """Cluster rows are flipped where that code counts them from the other end."""
    model = our_model(cutoffs=[8, 15], same_length=True, same_length_rule="mem_len+1")
    tokens = stream({"vocab_size": 24, "tgt_len": 4, "cutoffs": [8, 15]})
    state, values = to_reference(model, "nvidia")
    theirs, _ = Theirs(state, values, "nvidia", torch.float64).run(tokens.T, 4)
    torch.testing.assert_close(losses(model.double(), tokens, n_token=4), torch.cat(theirs).T, atol=1e-9, rtol=0)


@pytest.mark.parametrize("memory", [{"name": "none"}, {"name": "cache", "mem_len": 0}])
def test_models_without_memory_are_exported(memory: dict[str, Any]) -> None:
    for position in ("transformer_xl", "absolute", "absolute_per_layer"):
        model = our_model(memory=memory, position=position, max_distance=4)
        state, values = to_reference(model, "authors")
        tokens = stream({"vocab_size": 24, "tgt_len": 4, "cutoffs": []})
        back = from_reference(state, values, "authors")
        assert torch.equal(losses(back, tokens, n_token=4), losses(model, tokens, n_token=4))


def test_layers_that_share_u_and_v_after_all_fit_layouts_with_one_pair() -> None:
    model, tokens = our_model(untie_r=True), stream({"vocab_size": 24, "tgt_len": 4, "cutoffs": []})
    with pytest.raises(ConfigError, match=r"^model\.untie_r=true: layers have different u and v, .* huggingface$"):
        to_reference(model, "authors")
    for name in ("u", "v"):
        pairs = [getattr(layer.attention.position, name) for layer in model.layers]
        pairs[1].data.copy_(pairs[0].data)
    state, values = to_reference(model, "nvidia")
    assert state["r_w_bias"].shape == (2, 6)
    back = from_reference(state, values, "nvidia")
    assert torch.equal(losses(back, tokens, n_token=4), losses(model, tokens, n_token=4))


@pytest.mark.parametrize(
    ("changes", "layout", "key"),
    [
        ({"position": "rotary"}, "authors", "model.position"),
        ({"position": "none"}, "nvidia", "model.position"),
        ({"position": "shaw", "max_distance": 9}, "huggingface", "model.position"),
        ({"position": "shaw", "max_distance": 5}, "authors", "model.max_distance"),
        ({"terms": ["a", "b"]}, "authors", "model.terms"),
        ({"norm": "rmsnorm"}, "huggingface", "model.norm"),
        ({"norm_eps": 1e-6}, "authors", "model.norm_eps"),
        ({"final_norm": True, "pre_norm": True}, "authors", "model.final_norm"),
        ({"norm_queries": False, "pre_norm": True}, "authors", "model.norm_queries"),
        ({"ffn": "swiglu"}, "nvidia", "model.ffn"),
        ({"ffn": "gelu"}, "huggingface", "model.ffn"),
        ({"bias": False}, "authors", "model.bias"),
        ({"qk_norm": True}, "authors", "model.qk_norm"),
        ({"n_kv_head": 1}, "authors", "model.n_kv_head"),
        ({"memory": {"name": "cache", "mem_len": 5, "layers": [1]}}, "authors", "memory.layers"),
        ({"memory": {"name": "mix", "parts": [{"name": "cache", "mem_len": 4}]}}, "authors", "memory.name"),
    ],
)
def test_what_a_layout_cannot_say_is_refused(changes: dict[str, Any], layout: str, key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        to_reference(our_model(**changes), layout)
    assert refused.value.key == key
    assert layout in refused.value.rule


def test_other_norms_eps_is_said_where_there_is_a_key() -> None:
    assert to_reference(our_model(norm_eps=1e-6), "huggingface")[1]["layer_norm_epsilon"] == 1e-6


@pytest.mark.parametrize(
    ("layout", "changes", "message"),
    [
        ("authors", {"ext_len": 3}, r"config\.ext_len=> 0: the last ext_len tokens would be read twice"),
        ("authors", {"attn_type": 2}, r"config\.mem_len=5: attn_type=2 numbers the tokens of one segment"),
        ("nvidia", {"attn_type": 3}, r"config\.mem_len=5: attn_type=3 .*: the weights are the same"),
        ("authors", {"attn_type": 4}, r"config\.attn_type=4: layout authors has 0, 1, 2, 3"),
        ("huggingface", {"attn_type": 1}, r"config\.attn_type=1: layout huggingface has 0;"),
        ("authors", {"sample_softmax": 10}, r"config\.sample_softmax=> 0"),
        ("authors", {"untie_r": True}, r"config\.untie_r=true: layout authors has one pair"),
        ("authors", {"d_modle": 3}, r"config\.d_modle=3: no such key in layout authors; did you mean d_model"),
        ("authors", {"vocab_size": 24}, r"config\.vocab_size=24: no such key in layout authors"),
        ("huggingface", {"n_token": 9}, r"config\.n_token=9: vocab_size=24 says otherwise"),
        ("huggingface", {"tie_weight": False}, r"config\.tie_weight=false: tie_word_embeddings=True says otherwise"),
        ("authors", {"tie_projs": [True] * 4}, r"config\.tie_projs=.*: there are 3 clusters"),
        ("authors", {"tie_projs": "all"}, r"config\.tie_projs=all: must be a list"),
        ("authors", {"cutoffs": [8, 24]}, r"model\.cutoffs=\[8,24\]: the last cluster would be empty"),
        ("authors", {"n_layer": "two"}, r"model\.n_layer=two"),
        ("authors", {"txl_lightning": {"model.norm": 1}}, r"config\.txl_lightning\.model\.norm=1: no such key"),
        ("nowhere", {}, r"layout=nowhere: no such layout; choose one of authors, huggingface, nvidia"),
    ],
)
def test_configurations_are_refused_by_key(layout: str, changes: dict[str, Any], message: str) -> None:
    named = layout if layout in LAYOUTS else "authors"
    state = random_state(make(named), named)
    with pytest.raises(ConfigError, match=f"^{message}"):
        from_reference(state, make(named, **changes), layout)


@pytest.mark.parametrize("name", ["n_layer", "n_token", "mem_len"])
def test_missing_configuration_keys_are_named(name: str) -> None:
    config = make("authors")
    del config[name]
    with pytest.raises(ConfigError, match=rf"^config\.{name}=null: is missing"):
        from_reference(random_state(make("authors"), "authors"), config, "authors")


def test_keys_that_change_no_number_are_passed_over() -> None:
    config = make("huggingface", producer="x", batch=2, model_type="transfo-xl", init_std=0.02, adaptive=True)
    config |= {"proj_share_all_but_first": True, "eos_token_id": 0, "tie_weight": True, "n_token": 24}
    del config["tie_projs"], config["tie_word_embeddings"], config["tgt_len"]
    model = from_reference(random_state(make("huggingface"), "huggingface"), config, "huggingface")
    assert model.config.tie_projs == (False, True, True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("crit.cluster_bias"), r"state_dict=crit\.cluster_bias: is missing"),
        (lambda w: w.update(extra=w["r_w_bias"]), r"state_dict=extra: is no weight of"),
        (
            lambda w: w.update({"r_w_bias": w["r_w_bias"][:1]}),
            r"state_dict=r_w_bias: is \(1, 6\), but \(2, 6\) in a model of layout authors",
        ),
        (
            lambda w: w.update({"layers.1.dec_attn.qkv_net.weight": torch.zeros(36, 13)}),
            r"state_dict=layers\.1\.dec_attn\.qkv_net\.weight: is \(36, 13\), but \(36, 12\)",
        ),
        (
            lambda w: w.update({"crit.out_layers.0.weight": w["crit.out_layers.0.weight"] + 1}),
            r"state_dict=crit\.out_layers\.0\.weight: differs from word_emb\.emb_layers\.0\.weight",
        ),
        (lambda w: w["pos_emb.inv_freq"].mul_(1.01), r"state_dict=pos_emb\.inv_freq: are not the frequencies"),
        (lambda w: w.update({"r_r_bias": w["r_r_bias"].int()}), r"state_dict=r_r_bias: holds torch\.int32"),
    ],
)
def test_weights_are_refused_by_key(change: Any, message: str) -> None:
    state = random_state(make("authors"), "authors")
    change(state)
    with pytest.raises(ConfigError, match=f"^{message}"):
        from_reference(state, make("authors"), "authors")


@pytest.mark.parametrize("given", LAYOUTS)
@pytest.mark.parametrize("said", LAYOUTS)
def test_a_wrong_layout_is_told_from_the_keys(given: str, said: str) -> None:
    state = random_state(make(given), given)
    if given == said:
        from_reference(state, make(said), said)
        return
    with pytest.raises(ConfigError, match=rf"^layout={said}: \S+ does not fit: .* layout {given}; set layout={given}$"):
        from_reference(state, make(said), said)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tied_weights_may_stand_under_any_of_their_names(layout: str) -> None:
    config = make(layout, div_val=2)
    state = random_state(config, layout)
    whole = from_reference(state, config, layout).state_dict()
    first: dict[int, str] = {}
    for name, tensor in state.items():
        first.setdefault(tensor.data_ptr(), name)
    once = {name: tensor for name, tensor in state.items() if first[tensor.data_ptr()] == name}
    last = {tensor.data_ptr(): name for name, tensor in state.items()}
    other = {name: tensor for name, tensor in state.items() if last[tensor.data_ptr()] == name}
    assert len(once) == len(other) < len(state)
    for part in (
        once,
        other,
        {**once, "crit.out_projs.1": state[f"{'transformer.' * (layout == 'huggingface')}word_emb.emb_projs.1"]},
    ):
        model = from_reference(part, config, layout)
        assert all(torch.equal(tensor, whole[name]) for name, tensor in model.state_dict().items())
    assert model.softmax.weights[0] is model.embedding.tables[0].weight
    assert model.softmax.projections["1"] is model.embedding.projections["1"]


def test_widths_of_numbers() -> None:
    config = make("authors")
    state = {name: tensor.double() for name, tensor in random_state(config, "authors").items()}
    assert from_reference(state, config).dtype == torch.float64
    half = from_reference({name: tensor.half() for name, tensor in state.items()}, config)
    assert half.dtype == torch.float32
    assert torch.equal(half.u, state["r_w_bias"].half().float())


@pytest.mark.parametrize("kind", ["meta", "sparse", "complex"])
def test_weights_that_are_no_plain_numbers_are_refused(kind: str) -> None:
    odd = {
        "meta": torch.empty(3, device="meta"),
        "sparse": torch.eye(3).to_sparse(),
        "complex": torch.zeros(3, dtype=torch.complex64),
    }
    with pytest.raises(ConfigError, match=r"^state_dict=r_w_bias: is a torch\..*; save it as a dense tensor"):
        from_reference({"r_w_bias": odd[kind]}, {}, "authors")


def test_a_configuration_of_absurd_size_is_compared_before_it_is_built() -> None:
    config = {"n_layer": 1, "n_head": 1, "d_model": 10**12, "d_head": 1, "d_inner": 1, "n_token": 7, "mem_len": 0}
    with pytest.raises(ConfigError, match=r"^state_dict"):
        from_reference({"word_emb.emb_layers.0.weight": torch.zeros(7, 4)}, config, "authors")
