"""What the monitor says of memory and attention, against sums over pairs of tokens written out here."""

from __future__ import annotations

import copy
import csv
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor

from tests.points import watched
from tests.tiny import tiny_config
from txl_lightning.callbacks.attention_figures import AttentionFigures
from txl_lightning.callbacks.attention_seen import LayerAttention, attention_seen
from txl_lightning.commands.fit import fit
from txl_lightning.config import load
from txl_lightning.memory.knn import Knn
from txl_lightning.model.transformer import TransformerXL
from txl_lightning.types import Segment

EVERY = ["callbacks=memory_monitor", "callbacks.memory_monitor.attention_every_n_steps=1",
         "callbacks.memory_monitor.lanes=4", "trainer.log_every_n_steps=1"]  # fmt: skip


class Before(L.Callback):
    """What stood before the latest step: weights, memory and the segment that was read."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.model, self.batch = copy.deepcopy(pl_module.model).eval(), batch
        self.state = pl_module.lanes.current("train")


def bucket(count: int) -> str:
    low = 0 if count == 0 else 2 ** int(math.log2(count))
    return str(low) if low < 2 else f"{low}-{2 * low - 1}"


def inputs_of_layers(before: Before) -> list[Tensor]:
    found: list[Tensor] = []
    hooks = [b.register_forward_pre_hook(lambda _, args: found.append(args[0])) for b in before.model.blocks()]
    before.model(before.batch.tokens_BT, before.state, before.batch.segment)
    for hook in hooks:
        hook.remove()
    return found


def attention_by_pairs(before: Before, x_BTD: Tensor, layer: int) -> dict[str, dict[Any, float]]:
    """Sums over all heads, lanes and real queries of one layer: attention by key kind and bucket, |terms|."""
    block = before.model.blocks()[layer]
    attention, position = block.attention, block.attention.position
    hidden, filled = (before.state[f"layers.{layer}.cache.{name}"] for name in ("hidden", "filled"))
    rows = torch.cat([hidden, x_BTD], dim=1)
    rows = block.attention_norm(rows) if block.pre_norm else rows
    n_slot, n_head, width = hidden.shape[1], attention.n_head, attention.d_head
    q, k, _ = (part.unflatten(-1, (n_head, width)) for part in attention.qkv(rows).split(n_head * width, dim=-1))
    u, v = before.model.u, before.model.v  # all layers share them
    found: dict[str, dict[Any, float]] = {name: defaultdict(float) for name in ("memory", "age", "terms")}
    for b, length in enumerate(before.batch.segment.length.tolist()):
        for t in range(length):
            seen = list(range(n_slot - int(filled[b]), n_slot + t + 1))
            for h in range(n_head):
                scores = []
                for p in seen:
                    d = n_slot + t - p
                    half = 10000.0 ** (-torch.arange(0, 2 * (x_BTD.shape[2] // 2), 2) / x_BTD.shape[2]) * d
                    r = position.r(torch.cat([half.sin(), half.cos()])).unflatten(0, (n_head, width))[h]
                    query, key = q[b, n_slot + t, h], k[b, p, h]
                    terms = {"content_content": query @ key, "content_position": query @ r,
                             "u_content": u[h] @ key, "v_position": v[h] @ r}  # fmt: skip
                    for name, term in terms.items():
                        found["terms"][name] += abs(float(term))
                    scores.append(sum(terms.values()) / width**0.5)
                for p, weight in zip(seen, torch.stack(scores).softmax(dim=0).tolist(), strict=True):
                    found["memory"][p < n_slot] += weight
                    found["age"][bucket(n_slot + t - p)] += weight
    return found


def test_attention_by_layer_and_age_and_the_terms_equal_sums_over_pairs(tmp_path: Path) -> None:
    keys = ["data.segment_len=6", "memory.mem_len=9", "data.batch_size=2", "trainer.max_steps=3", "optim.lr=0.02"]
    before = Before()
    points, _ = watched(tiny_config(tmp_path, *EVERY, *keys, "trainer.val_check_interval=1000"), before)
    with torch.no_grad():
        layers = [attention_by_pairs(before, x, layer) for layer, x in enumerate(inputs_of_layers(before))]
    row, step = points.rows[-1][1], points.rows[-1][0]
    assert step == 3
    n_query = 2 * 2 * 6  # lanes, heads, tokens
    for layer, sums in enumerate(layers):
        assert row[f"memory/attention/L{layer}"] == pytest.approx(sums["memory"][True] / n_query, rel=1e-4)
    ages = {name.rpartition("/")[2]: value for name, value in row.items() if "attention_by_age" in name}
    expected = {name: sum(sums["age"][name] for sums in layers) / n_query / 2 for name in layers[0]["age"]}
    assert ages == pytest.approx(expected, rel=1e-4) and sum(ages.values()) == pytest.approx(1, rel=1e-5)
    for name in ("content_content", "content_position", "u_content", "v_position"):
        shares = [sums["terms"][name] / sum(sums["terms"].values()) for sums in layers]
        assert row[f"memory/terms/{name}"] == pytest.approx(sum(shares) / 2, rel=1e-4)


class Told:
    """Enough of a module to log to."""

    def __init__(self) -> None:
        self.figures: dict[str, float] = {}
        self.table: list[Any] = []
        self.trainer = self.strategy = self

    def reduce(self, values: Tensor, reduce_op: str) -> Tensor:
        return values

    def log_curves(self, figures: dict[str, float]) -> None:
        self.figures.update(figures)

    def log_table(self, **table: Any) -> None:
        self.table = table["rows"]


def test_attention_made_by_hand() -> None:
    """One lane of two tokens and padding; two slots, one of them without a place, and a single head."""
    segment = Segment(torch.tensor([False]), torch.tensor([2]))
    weights = torch.tensor([[[[0.5, 0.25, 0.25, 0, 0], [0.1, 0.2, 0.3, 0.4, 0], [1.0, 0, 0, 0, 0]]]])
    distance = torch.tensor([[[5, -1, 0, 0, 0], [6, -1, 1, 0, 0], [7, -1, 2, 1, 0]]])
    seen = LayerAttention(layer=0, weights_BHTP=weights, terms_BHTP={}, distance_BTP=distance,
                          visible_BTP=weights[0] > 0, n_memory=2)  # fmt: skip
    figures, told = AttentionFigures(segment, layers=1), Told()
    figures.add(seen)
    figures.add_hits(0, torch.tensor([[[[3, 0], [8, 9], [1, 1]]]]))
    figures.show(told)
    assert told.figures == pytest.approx(
        {
            "memory/attention/L0": (0.75 + 0.3) / 2,
            "memory/attention_by_age/no_place": (0.25 + 0.2) / 2,
            "memory/attention_by_age/0": (0.25 + 0.4) / 2,
            "memory/attention_by_age/1": 0.3 / 2,
            "memory/attention_by_age/2-3": 0,
            "memory/attention_by_age/4-7": (0.5 + 0.1) / 2,
            "memory/knn/hit_age/L0": 20 / 3,
            **{f"memory/knn/hits_by_age/L0/{name}": share for name, share in (("1", 0), ("2-3", 1 / 3), ("4-7", 0))},
            "memory/knn/hits_by_age/L0/8-15": 2 / 3,
        }
    )
    assert told.table == [pytest.approx([0, 0.225, 0.325, 0.15, 0, 0.3])]


VARIANTS = ["memory=none", "memory=compressive", "memory=window", "memory=tokens", "memory=titans", "memory=expire",
            "model.position=rotary", "model.position=shaw", "model.n_kv_head=1", "model.terms=[a,c]",
            "memory=knn"]  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_shown_is_what_the_model_computes(variant: str) -> None:
    """With the observer the outputs are the model's own, and attention adds up to 1, whatever memory and position."""
    torch.manual_seed(0)
    size = ["model.n_layer=2", "model.d_model=16", "model.n_head=2", "model.d_head=8", "model.d_inner=8"]
    config = load([variant, *size, "data.segment_len=8", "model.init_std=0.3"])
    model = TransformerXL(config).eval()
    tokens = torch.randint(config.model.vocab_size, (2, 3, 8))
    seen: list[LayerAttention] = []
    with torch.no_grad():
        state = model.init_state(2)
        for segment in tokens.unbind(dim=1):
            given, out = state, model(segment, state)
            state = out.state
        with attention_seen(model, seen.append):
            again = model(tokens[:, -1], given)
        torch.testing.assert_close(again.hidden_BTD, out.hidden_BTD, rtol=1e-4, atol=1e-5)
        assert torch.equal(model(tokens[:, -1], given).hidden_BTD, out.hidden_BTD)  # and the model is as it was
    assert [each.layer for each in seen] == [0, 1]
    for each in seen:
        torch.testing.assert_close(each.weights_BHTP.sum(dim=-1), torch.ones(2, 2, 8))
        assert (each.n_memory > 0) == (variant not in ("memory=none", "memory=knn"))


def test_hit_ages_of_a_search_by_hand() -> None:
    """A ring of 4 entries, of which token 5 is the newest: entries hold tokens 4, 5, 2, 3."""
    memory = Knn(mem_len=4, top_k=2, normalise=False, n_head=1, d_head=2)
    keys = torch.tensor([[0.0, 1.0], [1.0, 0.0], [-1.0, 0.0], [0.0, -1.0]])[None, :, None]
    state = {"keys": keys, "values": keys, "written": torch.tensor([6])}
    queries = torch.tensor([[[[1.0, 0.5], [-0.5, -1.0]]]])
    ages = memory.hit_ages(state, queries)
    assert sorted(ages[0, 0, 0].tolist()) == [1, 2]  # tokens 5 and 4
    assert sorted(ages[0, 0, 1].tolist()) == [3, 4]  # tokens 3 and 2
    state["written"] = torch.tensor([1])
    assert sorted(memory.hit_ages(state, queries)[0, 0, 0].tolist()) == [0, 1]


class Updates(L.Callback):
    """The norm of what each step changed, and the lanes that start anew, from state and batch alone."""

    def __init__(self) -> None:
        self.updates: list[float] = []
        self.resets: list[int] = []
        self.old: Any = None

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        new = pl_module.lanes.current("train")["layers.1.cache.hidden"].double()
        if self.old is not None:
            self.updates.append(float((new - self.old).norm() / new.norm()))
        self.old = new
        self.resets.append(int(batch.segment.reset.sum()))


def test_updates_and_resets(tmp_path: Path) -> None:
    keys = ["memory.mem_len=24", "data.ratios=[0.1,0.8,0.1]", "trainer.max_steps=8", "trainer.log_every_n_steps=2"]
    direct = Updates()
    points, _ = watched(tiny_config(tmp_path, "callbacks=memory_monitor", *keys), direct)
    updates = points.curve("memory/cache/update/L1")
    assert updates == {step: pytest.approx(direct.updates[step - 2], rel=1e-5) for step in (2, 4, 6, 8)}
    resets = points.curve("memory/resets")
    assert resets == {step: sum(direct.resets[step - 2 : step]) for step in (2, 4, 6, 8)} and resets[2] == 4
    assert sum(resets.values()) > 4  # a second pass began
    assert not [name for name in points.rows[-1][1] if "attention" in name]  # the first look comes at step 100


def test_a_run_that_goes_on_is_looked_at_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    """Also in its very first step, whose memory comes from the checkpoint."""
    keys = [*EVERY, "trainer.max_steps=4", "memory.mem_len=24", "trainer.save_every_steps=2", "logger=csv"]
    whole = fit(tiny_config(tmp_path, *keys, f"run_dir={tmp_path / 'whole'}")).run_dir
    parts = tiny_config(tmp_path, *keys, f"run_dir={tmp_path / 'parts'}", "trainer.stop_at_step=2")
    fit(parts)
    going_on = tiny_config(tmp_path, *keys, f"run_dir={tmp_path / 'parts'}")
    fit(going_on, resume=str(tmp_path / "parts" / "checkpoints" / "last.ckpt"))
    one, two = ((place / "csv" / "metrics.csv").read_text() for place in (whole, tmp_path / "parts"))
    rows = [[row for row in csv.DictReader(text.splitlines()) if row["train/loss"]] for text in (one, two)]
    looked = [[{name: row[name] for name in row if name.startswith("memory/")} for row in found] for found in rows]
    assert looked[0] == looked[1] and [row["step"] for row in rows[0]] == ["1", "2", "3", "4"]
    assert all(row["memory/attention/L1"] and row["memory/cache/update/L0"] for row in rows[0])


def test_documents_count_as_resets(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("abcd\n" * 400)
    config = tiny_config(tmp_path, "callbacks=memory_monitor", "data.document=line", "memory.reset=document",
                         "trainer.max_steps=1", "trainer.log_every_n_steps=1", "data.segment_len=12")  # fmt: skip
    points, _ = watched(config)
    assert points.curve("memory/resets") == {1: 4 * 2}  # documents of 5 bytes and their end
