"""What `dry_run` promises, beside what a real step is measured to take."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.tiny import tiny_config
from txl_lightning import TextDataModule, TransformerXLModule
from txl_lightning.commands import dry_run
from txl_lightning.config import Config, ConfigError
from txl_lightning.model.transformer import TransformerXL
from txl_lightning.training.footprint import LiveBytes, footprint
from txl_lightning.training.optim import build_optimizer
from txl_lightning.training.trainer import build_trainer
from txl_lightning.training.zero import held_by_rank
from txl_lightning.types import State, detach, n_byte

WIDE = [
    "model.n_layer=3", "model.d_model=64", "model.n_head=4", "model.d_head=16", "model.d_inner=256",
    "data.segment_len=48", "data.batch_size=6", "memory.mem_len=48",
]  # fmt: skip
WINDOW = ["memory.gradient=carry", "trainer.bptt_segments=2", "trainer.accumulate_grad_batches=2"]
CASES = {
    "wider, with dropout": [*WIDE, "model.dropout=0.1", "model.dropatt=0.1"],
    "checkpointing": [*WIDE, "model.checkpointing=true"],
    "bf16-mixed": [*WIDE, "trainer.precision=bf16-mixed"],
    "bf16-true, checkpointing": [*WIDE, "trainer.precision=bf16-true", "model.checkpointing=true"],
    "adaptive softmax": [*WIDE, "model.cutoffs=[40,102]", "model.div_val=2"],
    "compressive": [*WIDE, "memory=compressive"],
    "tokens, two segments": [*WIDE[:-1], "memory=tokens", *WINDOW],
    "cache, two segments, checkpointing": [*WIDE, *WINDOW, "model.checkpointing=true"],
    "associative, bf16-mixed": [*WIDE[:-1], "memory=associative", "trainer.precision=bf16-mixed"],
    "titans": [*WIDE[:-1], "memory=titans"],
}


def real_step(model: TransformerXL, state: State, config: Config) -> State:
    """Forward and backward of one optimizer step, written out."""
    tokens_BT = dry_run.some_targets(config, config.data.batch_size)
    loss = torch.zeros((), dtype=torch.float32)
    for _ in range(config.trainer.bptt_segments):
        out = model(tokens_BT, state, None, tokens_BT)
        loss = loss + out.losses_BT.sum() + sum(out.aux_losses.values())  # type: ignore[union-attr]
        state = out.state
    state = detach(state)
    del out
    loss.backward()
    return state


def precision_plugin(config: Config) -> Any:
    return L.Trainer(accelerator="cpu", precision=config.trainer.precision, logger=False).precision_plugin  # type: ignore[arg-type]


def measured(config: Config, folder: Path) -> dict[str, int]:
    """Bytes as they are: of tensors that are there, and the highest point of torch's own allocator during a step."""
    half = "bf16" in config.trainer.precision
    model = precision_plugin(config).convert_module(TransformerXL(config).train())
    state = model.init_state(config.data.batch_size, dtype=torch.bfloat16 if half else torch.float32)
    optimizer = build_optimizer(model.named_parameters(), config.optim)
    with precision_plugin(config).forward_context():
        state = real_step(model, state, config)
        optimizer.step()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
            after = real_step(model, state, config)
    averages = [value for held in optimizer.state.values() for name, value in held.items() if name != "step"]
    return {
        "parameter": sum(weight.nbytes for weight in model.parameters()),
        "gradient": sum(weight.grad.nbytes for weight in model.parameters() if weight.grad is not None),
        "optimizer": sum(value.nbytes for value in averages),  # and a counter for each weight
        "state": n_byte(after),
        "activation": peak_of(found, folder / "trace.json"),
    }


def peak_of(found: Any, file: Path) -> int:
    """The most bytes that were there at a time, beside what was there before."""
    found.export_chrome_trace(str(file))
    events = [event for event in json.loads(file.read_text())["traceEvents"] if event.get("name") == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event["ts"]):
        now += event["args"]["Bytes"]
        peak = max(peak, now)
    return peak


@pytest.mark.parametrize("case", CASES)
def test_bytes_are_those_of_a_real_step(case: str, tmp_path: Path) -> None:
    config = tiny_config(tmp_path, *CASES[case])
    found, real = dry_run.needs(config), measured(config, tmp_path)
    for name in ("parameter", "gradient", "optimizer", "state"):
        assert getattr(found, f"{name}_bytes") == real[name], name
    print(f"{case}: activations {found.activation_bytes:,}, measured {real['activation']:,}")
    assert found.activation_bytes == pytest.approx(real["activation"], rel=0.2)


def test_each_rank_has_its_lanes_and_all_the_weights(tmp_path: Path) -> None:
    keys = ["data.batch_size=8", "eval.batch_size=8", "strategy=ddp"]
    alone, both = (dry_run.needs(tiny_config(tmp_path, *keys, f"trainer.devices={n}")) for n in (1, 2))
    assert (both.parameter_bytes, both.gradient_bytes) == (alone.parameter_bytes, alone.gradient_bytes)
    assert 2 * both.state_bytes == alone.state_bytes
    assert both.activation_bytes == pytest.approx(alone.activation_bytes / 2, rel=0.15)


def test_lanes_in_chunks_need_the_activations_of_one(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "data.batch_size=8")
    targets_BT = dry_run.some_targets(config, 8)
    keys: dict[str, Any] = {"precision": "32-true", "kind": "cpu"}
    whole, one = footprint(config, targets_BT, **keys), footprint(config, targets_BT[:2], **keys)
    parts = footprint(config, targets_BT, **keys, chunks=4)
    assert parts.state_bytes == whole.state_bytes
    assert parts.activation_bytes == one.activation_bytes + 3 * one.state_bytes < whole.activation_bytes


class States(L.Callback):
    """Bytes of memory that a step holds at its last backward pass."""

    def on_after_backward(self, trainer: L.Trainer, pl_module: Any) -> None:
        lanes = pl_module.lanes
        held = [lanes._marked[0], lanes.current("train") or {}, lanes._proposed["train"][0]]
        self.n_byte = sum({t.untyped_storage().data_ptr(): t.nbytes for state in held for t in state.values()}.values())


def test_a_step_of_several_batches_keeps_the_memory_before_it(tmp_path: Path) -> None:
    more = {}
    for count in (1, 2):
        config = tiny_config(tmp_path, f"trainer.accumulate_grad_batches={count}", "trainer.max_steps=2")
        found, seen = dry_run.needs(config), States()
        build_trainer(config, callbacks=[seen]).fit(TransformerXLModule(config), TextDataModule(config))
        more[count] = (found.activation_bytes, seen.n_byte, found.state_bytes)
    assert more[2][0] - more[1][0] == more[2][1] - more[1][1] == more[1][2] > 0


def test_live_bytes_follow_storages_not_views() -> None:
    present, live = torch.ones(8), LiveBytes()
    live.start([present])
    with live:
        one = present * 2  # 32 bytes
        view = one.view(2, 4)[0]
        del one
        assert live.now == 32  # the view holds it
        more = torch.cat([view, view, view])  # 48
        del view
        present.add_(1)
    assert (live.now, live.peak) == (48, 80) and len(more) == 12


def test_what_cannot_fit_is_refused_with_what_to_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dry_run, "_available", lambda kind: 1 << 20)
    with pytest.raises(ConfigError) as refused:
        dry_run.needs(tiny_config(tmp_path))
    said = str(refused.value)
    assert "data.batch_size=4: a step needs 1." in said and "per rank and the machine has 1 MiB of memory; " in said
    assert "set model.checkpointing=true (now false)" in said and "memory.mem_len=64; dry_run=true" in said


def test_ranks_of_one_machine_share_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two = tiny_config(tmp_path, "trainer.devices=2", "strategy=ddp")
    own = dry_run.needs(two).total_bytes
    monkeypatch.setattr(dry_run, "_available", lambda kind: 2 * own)
    assert dry_run.needs(two).local_ranks == 2
    monkeypatch.setattr(dry_run, "_available", lambda kind: 2 * own - 1)
    with pytest.raises(ConfigError, match=r"per rank, \S+ \SiB for the 2 ranks here, and the machine has"):
        dry_run.needs(two)
    four = tiny_config(tmp_path, "trainer.devices=2", "trainer.num_nodes=2", "strategy=ddp")
    assert dry_run.needs(four).local_ranks == 2  # the other two have a machine of their own


def test_what_devices_leave_in_main_memory_must_fit_there(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "trainer.devices=2", "strategy=ddp")
    found = replace(dry_run.needs(config), host_bytes=600, machine_bytes=1200)
    dry_run._refuse_too_much(found, config, kind="cuda")
    with pytest.raises(ConfigError, match=r"trainer\.devices=2: a step needs .* and the machine has .* of main memory"):
        dry_run._refuse_too_much(replace(found, machine_bytes=1199), config, kind="cuda")
    with pytest.raises(ConfigError, match=r"per rank and the device has 1 B; "):
        dry_run._refuse_too_much(replace(found, available_bytes=1), config, kind="cuda")


PUBLISHED = {None: 120.0, 1: 31.4, 2: 16.6, 3: 1.88}
"""GB of 7.5 billion parameters in fp16 with Adam on 64 ranks: ZeRO's paper (arXiv:1910.02054), figure 1 and table 1."""


@pytest.mark.parametrize("stage", PUBLISHED)
def test_zero_divides_as_its_paper_says(stage: int | None) -> None:
    n = 7_500_000_000
    shared = {"ranks": 64, "parameters": n, "parameter_bytes": 2 * n}
    # the paper counts weights in float32 as the optimizer's, mixed precision without ZeRO too: that is stage 0
    held = held_by_rank(stage=stage or 0, **shared, optimizer_bytes=8 * n)
    total = held.parameter_bytes + held.gradient_bytes + held.optimizer_bytes
    assert total / 1e9 == pytest.approx(PUBLISHED[stage], rel=0.003)


def test_zero_in_full_precision_and_off_the_device() -> None:
    keys = {"ranks": 4, "parameters": 1000, "parameter_bytes": 4000, "optimizer_bytes": 8000}
    found = {stage: held_by_rank(stage=stage, **keys) for stage in (None, 0, 1, 2, 3)}  # type: ignore[arg-type]
    bytes_of = {s: (h.parameter_bytes, h.gradient_bytes, h.optimizer_bytes, h.host_bytes) for s, h in found.items()}
    assert bytes_of[None] == bytes_of[0] == (4000, 4000, 8000, 0)
    assert bytes_of[1] == (4000, 4000, 3000, 0)  # with weights of its own
    assert bytes_of[2] == (4000, 1000, 3000, 0) and bytes_of[3] == (1000, 1000, 3000, 0)
    away = held_by_rank(stage=3, **keys, offload_optimizer=True, offload_parameters=True)  # type: ignore[arg-type]
    assert replace(away, host_bytes=0) == replace(found[3], parameter_bytes=0, optimizer_bytes=0)
    assert away.host_bytes == 3000 + 1000
