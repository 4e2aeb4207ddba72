"""Lanes read in chunks, and memory that waits on the CPU: one update, the same numbers, less at a time."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy, SingleDeviceStrategy

from tests.test_resume import assert_same, config_of, saved, unequal
from tests.test_resume import train as train_fully
from tests.tiny import Losses, tiny_config, write_corpus
from txl_lightning import LaneState, TextDataModule, TransformerXL, TransformerXLModule
from txl_lightning.commands import dry_run
from txl_lightning.config import Config, ConfigError, load
from txl_lightning.ranks import check_chunks, chunks_for_fewer
from txl_lightning.training.divergence import NonFiniteLoss
from txl_lightning.training.trainer import build_trainer
from txl_lightning.types import Batch, Chunk, Position, Segment

N_BYTE, STEPS = 420, 8  # an epoch of 6 segments in lanes of 95, 94, 94, 94 targets: the last one has unequal lengths
CASES = {
    "cache": ["memory=cache", "memory.mem_len=24"],
    "a loss of its own, accumulation": [
        "memory=compressive", "memory.mem_len=16", "trainer.accumulate_grad_batches=2",
    ],
    "a loss of its own, documents": ["memory=expire", "memory.reset=epoch"],
    "windows of two segments": [
        "memory=tokens", "memory.gradient=carry", "trainer.bptt_segments=2", "trainer.accumulate_grad_batches=4",
    ],
    "average and checkpointing": ["memory=cache", "optim.ema=0.8", "model.checkpointing=true"],
}  # fmt: skip

CHUNKS = ["trainer.lane_chunks=4"]


class Seen(L.Callback):
    """Lanes of every forward pass, gradients before every update, and hooks around backward passes."""

    def __init__(self) -> None:
        self.lanes: list[int] = []
        self.gradients: list[torch.Tensor] = []
        self.backward = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.model.register_forward_pre_hook(self._note)

    def _note(self, model: Any, given: Any) -> None:
        if model.training:
            self.lanes.append(len(given[0]))
            assert all(len(tensor) == len(given[0]) for tensor in given[1].values())

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self.backward += 1

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.gradients.append(torch.cat([weight.grad.flatten() for weight in pl_module.parameters()]))


def fit(config: Config, *callbacks: L.Callback, double: bool = False) -> tuple[torch.Tensor, TransformerXLModule]:
    """All losses of training, and the module."""
    torch.manual_seed(0)
    module, seen = TransformerXLModule(config), Losses()
    module = module.double() if double else module
    build_trainer(config, callbacks=[seen, *callbacks]).fit(module, TextDataModule(config))
    return torch.tensor(seen.values, dtype=torch.float64), module


def small(tmp_path: Path, *overrides: str) -> Config:
    if not (tmp_path / "corpus.txt").exists():
        write_corpus(tmp_path / "corpus.txt", n_byte=N_BYTE)
    return tiny_config(tmp_path, f"trainer.max_steps={STEPS}", *overrides)


@pytest.mark.parametrize("case", CASES)
def test_chunks_change_no_loss(case: str, tmp_path: Path) -> None:
    """Float32: up to rounding. One forward pass per chunk and one update, whose gradient is the same."""
    whole = Seen()
    all_at_once = fit(small(tmp_path, *CASES[case]), whole)
    for count in (2, 4) if case == "cache" else (4,):
        seen = Seen()
        losses, module = fit(small(tmp_path, *CASES[case], f"trainer.lane_chunks={count}"), seen)
        assert module.lanes.place().epoch > 0  # past the lanes' unequal ends
        torch.testing.assert_close(losses, all_at_once[0], rtol=1e-6, atol=0)
        assert seen.lanes == [4 // count] * count * len(whole.lanes)
        assert seen.backward == count * whole.backward and len(seen.gradients) == len(whole.gradients) == STEPS
        there, here = (each.lanes.state_dict() for each in (all_at_once[1], module))
        assert here["position"] == there["position"]
        for key, tensor in there["lanes"].items():
            torch.testing.assert_close(here["lanes"][key], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", ["a loss of its own, accumulation", "a loss of its own, documents"])
def test_chunks_are_exact(case: str, tmp_path: Path) -> None:
    """In float64 a wrong weight of anything shows: lanes of unequal length, auxiliary losses, accumulation."""
    expected, parts = Seen(), Seen()
    base = fit(small(tmp_path, *CASES[case]), expected, double=True)[0]
    losses = fit(small(tmp_path, *CASES[case], "trainer.lane_chunks=4"), parts, double=True)[0]
    torch.testing.assert_close(losses, base, rtol=1e-9, atol=0)  # compressive computes its own loss in float32
    for one, other in zip(parts.gradients, expected.gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)


def test_chunks_under_autocast(tmp_path: Path) -> None:
    """A backward pass inside Lightning's autocast: same losses as far as bfloat16 tells, float32 gradients."""
    keys = ["memory=cache", "trainer.precision=bf16-mixed", "trainer.max_steps=4"]
    whole, parts = Seen(), Seen()
    base, losses = (fit(small(tmp_path, *keys, *more), seen)[0] for more, seen in (([], whole), (CHUNKS, parts)))
    torch.testing.assert_close(losses, base, rtol=5e-3, atol=0)
    assert parts.gradients[0].dtype == torch.float32
    similar = torch.nn.functional.cosine_similarity(parts.gradients[0], whole.gradients[0], dim=0)
    assert similar > 0.999


def test_a_loss_over_lanes_is_the_sum_of_their_shares(tmp_path: Path) -> None:
    """What `Aux.losses` promises, for both strategies of ours that have one, with lanes of unequal length."""
    length, reset = torch.tensor([16, 16, 9, 0]), torch.zeros(4, dtype=torch.bool)
    tokens = torch.randint(0, 257, (4, 64), generator=torch.Generator().manual_seed(1))
    for keys in (["memory=compressive"], ["memory=expire", "memory.max_span=32"]):
        model = TransformerXL(small(tmp_path, *keys, "memory.mem_len=16")).train()
        state = model.init_state(4)
        for start in range(0, 48, 16):
            state = model(tokens[:, start : start + 16], state).state
        whole, first, second = (
            model(
                tokens[lanes, 48:64], {key: tensor[lanes] for key, tensor in state.items()},
                Segment(reset[lanes], length[lanes]),
            ).aux_losses
            for lanes in (slice(0, 4), slice(0, 1), slice(1, 4))
        )  # fmt: skip
        assert whole
        for key, loss in whole.items():
            assert loss > 0
            torch.testing.assert_close(loss, (16 * first[key] + 25 * second[key]) / 41)


def test_memory_figures_are_those_of_all_lanes(tmp_path: Path) -> None:
    keys = [*CASES["a loss of its own, accumulation"], "trainer.max_steps=2"]
    one, four = (fit(small(tmp_path, *keys, f"trainer.lane_chunks={count}"))[1]._reported for count in (1, 4))
    assert one.keys() == four.keys() and any(value > 0 for value in one.values())
    for name, value in one.items():
        torch.testing.assert_close(four[name].float(), value.float(), rtol=1e-4, atol=1e-5)


def test_the_lanes_of_a_loss_that_is_not_finite_are_named(tmp_path: Path) -> None:
    class Spoils(L.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                pl_module.lanes.current("train")["layers.0.cache.hidden"][3] = float("nan")

    config = small(tmp_path, "memory=cache", "trainer.lane_chunks=2")
    with pytest.raises(NonFiniteLoss, match=r"at step 2, lanes \[3\]:"):
        fit(config, Spoils())


def test_stopped_and_resumed_with_chunks_and_dropout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit; offloading changes nothing of it and may come and go."""
    keys = ["memory=compressive", "trainer.accumulate_grad_batches=2", "trainer.lane_chunks=2"]
    losses, _ = train_fully(config_of(tmp_path, "whole", *keys), monkeypatch)
    found: list[float] = []
    for stop, where in ((7, "cpu"), (13, "none"), (None, "cpu")):
        limit = [] if stop is None else [f"trainer.stop_at_step={stop}"]
        config = config_of(tmp_path, "parts", *keys, f"memory.offload={where}", *limit)
        found += train_fully(config, monkeypatch, resume=bool(found))[0]
    assert found == losses
    assert_same(tmp_path / "whole", tmp_path / "parts")


def test_the_number_of_chunks_may_change_at_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = ["model.dropout=0.0", "model.dropatt=0.0", "memory=cache"]
    losses, _ = train_fully(config_of(tmp_path, "whole", *keys), monkeypatch)
    found: list[float] = []
    for stop, count in ((5, 4), (11, 1), (20, 2)):
        config = config_of(tmp_path, "parts", *keys, f"trainer.lane_chunks={count}", f"trainer.stop_at_step={stop}")
        found += train_fully(config, monkeypatch, resume=bool(found))[0]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), rtol=1e-5, atol=0)
    there, here = (saved(tmp_path / run)["txl_lightning"]["lanes"] for run in ("whole", "parts"))
    assert here["position"] == there["position"]
    assert {key: tensor.shape for key, tensor in here["lanes"].items()} == {
        key: tensor.shape for key, tensor in there["lanes"].items()
    }


# memory.offload=cpu


@pytest.mark.parametrize("case", ["cache", "windows of two segments"])
def test_offloading_changes_no_bit(case: str, tmp_path: Path) -> None:
    for count in (1, 2):
        keys = [*CASES[case], f"trainer.lane_chunks={count}", "trainer.val_check_interval=3", "model.dropout=0.2"]
        here, module = fit(small(tmp_path, *keys))
        away, other = fit(small(tmp_path, *keys, "memory.offload=cpu"))
        assert torch.equal(here, away) and module.scores == other.scores
        assert unequal(module.lanes.state_dict(), other.lanes.state_dict()) == []
        assert unequal(dict(module.state_dict()), dict(other.state_dict())) == []


def test_only_the_lanes_of_a_chunk_are_on_the_device(tmp_path: Path) -> None:
    """The `meta` device stands for a GPU: what the state is on between steps, and how much a step fetches."""
    lanes = LaneState(model_resets=True, offload=True)
    tokens = torch.zeros(2, 3, dtype=torch.int64, device="meta")
    batch = Batch(tokens, tokens, Segment.full(tokens), 12, Position(0, 0))
    for index in range(2):
        state = lanes.read("train", batch, lambda n: {"h": torch.ones(n, 5)}, chunk=Chunk(index, 2))
        assert state["h"].is_meta and state["h"].shape == (2, 5)
        lanes.propose("train", {"h": torch.full((2, 5), float(index))}, batch, chunk=Chunk(index, 2))
        assert lanes.is_whole("train") == (index == 1)
    lanes.commit("train")
    found = lanes.current("train")["h"]
    assert found.device.type == "cpu" and found[:, 0].tolist() == [0, 0, 1, 1]


@pytest.mark.gpu
def test_offloading_from_a_gpu_changes_no_bit(tmp_path: Path) -> None:
    keys = ["memory=cache", "trainer.accelerator=cuda", "trainer.lane_chunks=2", "trainer.val_check_interval=3"]
    here, module = fit(small(tmp_path, *keys))
    away, other = fit(small(tmp_path, *keys, "memory.offload=cpu"))
    assert torch.equal(here, away)
    half = [fit(small(tmp_path, *keys[:2], "trainer.precision=16-mixed", *more))[0] for more in ([], CHUNKS)]
    torch.testing.assert_close(*half, rtol=5e-3, atol=0)  # the loss scale covers all chunks
    state = other.lanes.current("train")
    assert all(tensor.is_pinned() for tensor in state.values())
    assert unequal(module.lanes.state_dict(), other.lanes.state_dict()) == []


# what cannot be


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            ["trainer.lane_chunks=3"],
            "trainer.lane_chunks=3: must divide the 4 lanes of each rank (data.batch_size=4 over 1); set it to 2 or 4, "
            "or data.batch_size to 3 or 6",
        ),
        (
            ["trainer.lane_chunks=4", "trainer.devices=2", "strategy=ddp"],
            "trainer.lane_chunks=4: must divide the 2 lanes of each rank (data.batch_size=4 over 2); set it to 2, "
            "or data.batch_size to 8",
        ),
        (
            ["memory=none", "memory.offload=cpu"],
            "memory.offload=cpu: memory=none keeps nothing that could be on the cpu; set it to none, or take a memory",
        ),
        (
            ["memory=mix", "memory.parts=[{name: cache, offload: cpu}]"],
            "the memory of all parts is kept in one place; set memory.offload",
        ),
    ],
)
def test_refusals(keys: list[str], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        small(tmp_path, *keys)
    assert said in str(caught.value)


def test_nearest_numbers() -> None:
    for lanes, ranks, chunks in ((12, 2, 4), (7, 1, 2), (64, 8, 3)):
        with pytest.raises(ConfigError) as caught:
            check_chunks(lanes, ranks=ranks, chunks=chunks)
        numbers = caught.value.cure.removeprefix("set it to ").replace("or data.batch_size to ", "").split(", ")
        for number in numbers[0].split(" or "):
            check_chunks(lanes, ranks=ranks, chunks=int(number))
        for number in numbers[1].split(" or "):
            check_chunks(int(number), ranks=ranks, chunks=chunks)
    assert [chunks_for_fewer(lanes=12, at_most=size) for size in (12, 6, 5, 4, 1)] == [1, 2, 3, 3, 12]


def test_a_trainer_with_more_ranks_than_the_configuration_says(tmp_path: Path) -> None:
    data = TextDataModule(small(tmp_path, "trainer.lane_chunks=4"))
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    data.trainer = SimpleNamespace(global_rank=0, world_size=2, strategy=strategy)  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=r"lane_chunks=4: must divide the 2 lanes of each rank"):
        data.train_dataloader()


def test_a_strategy_that_counts_backward_passes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As DeepSpeed's does, which would reduce gradients after each chunk."""
    assert DeepSpeedStrategy.handles_gradient_accumulation.fget(None)  # type: ignore[attr-defined]
    monkeypatch.setattr(SingleDeviceStrategy, "handles_gradient_accumulation", True)
    with pytest.raises(ConfigError, match=r"trainer\.lane_chunks=2: SingleDeviceStrategy takes every backward pass"):
        fit(small(tmp_path, "trainer.lane_chunks=2"))


def test_dry_run_shows_smaller_activations(tmp_path: Path) -> None:
    whole, parts = (dry_run.needs(small(tmp_path, f"trainer.lane_chunks={count}")) for count in (1, 4))
    assert parts.activation_bytes < 0.5 * whole.activation_bytes and parts.state_bytes == whole.state_bytes
    assert whole.total_bytes - parts.total_bytes == whole.activation_bytes - parts.activation_bytes


def test_dry_run_counts_what_is_on_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = ["trainer.lane_chunks=4", "trainer.precision=32-true"]
    monkeypatch.setattr(dry_run, "device_kind", lambda config: "cuda")
    on_cpu = dry_run.footprint  # torch without cuda makes no tensors of that kind, not even without numbers
    monkeypatch.setattr(dry_run, "footprint", lambda *args, **keys: on_cpu(*args, **{**keys, "kind": "cpu"}))
    monkeypatch.setattr(dry_run, "_available", lambda kind: None)
    here, away = (dry_run.needs(small(tmp_path, *keys, f"memory.offload={where}")) for where in ("none", "cpu"))
    assert here.total_bytes - away.total_bytes == 2 * here.state_bytes * 3 // 4


def test_published_runs_that_used_chunks_say_so() -> None:
    configs = Path(__file__).resolve().parent.parent / "configs" / "experiment"
    for name in ("nvidia_wt103_base", "nvidia_wt103_large"):
        assert "trainer.lane_chunks=8" in (configs / f"{name}.yaml").read_text()
        load([f"experiment={name}", "trainer.lane_chunks=8"])
