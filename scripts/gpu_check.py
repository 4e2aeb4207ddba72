"""What only a GPU can tell: is everything right there, how fast, how much memory.

    python scripts/gpu_check.py --out check.json         the default parts, within --budget seconds (default 440)
    python scripts/gpu_check.py --parts attention,tune   some of them
    python scripts/gpu_check.py --dry-run                tiny sizes on the CPU, the kernels in Triton's interpreter

Parts:
    correctness  each backend of attention against the terms written out in float64
    attention    ms and peak MiB of forward and backward at six shapes, and the time of every kernel
    training     `txl bench`: tokens/s of four published models with memory, captured, compiled, and as they are
    reading      `txl bench`: evaluation and decoding of enwik8_base
    overhead     `txl bench`: what the trainer adds to a step of enwik8_base
    memories     `txl bench`: training and evaluation with every memory
    tests        `pytest -m gpu`: captured training, evaluation and decoding against plain ones, no waiting
    tune         how the kernels are best cut into tiles
What fails or finds no time left is reported and hides nothing else.

correctness, attention and tune need torch with Triton, huggingface_hub and safetensors only; what is measured with
`txl bench` also Hydra and Lightning, tests pytest; nothing needs DeepSpeed.
Exit code: 1 where a comparison is wrong, else 0.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
if "--dry-run" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are defined

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what deterministic algorithms ask of cuBLAS

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from txl_lightning.config import ModelConfig  # noqa: E402
from txl_lightning.model.attention import Attention  # noqa: E402
from txl_lightning.model.positions import Biases, Mask, Reading, distance_table  # noqa: E402
from txl_lightning.types import MASKED  # noqa: E402

PARTS = ("correctness", "attention", "reading", "training", "overhead", "memories", "tests", "tune")
WAYS = ("triton", "triton in order", "compiled", "shift")  # in order: the table's gradient summed deterministically


class Shape(NamedTuple):
    """Lanes, heads, tokens, memory, width of a head."""

    lanes: int
    heads: int
    tokens: int
    memory: int
    width: int


SIX = (
    Shape(60, 10, 150, 150, 41),
    Shape(64, 8, 192, 192, 64),
    Shape(22, 8, 512, 512, 64),
    Shape(16, 16, 384, 384, 64),
    Shape(8, 8, 512, 3584, 64),
    Shape(4, 16, 2048, 2048, 64),
)
ODD = (Shape(3, 2, 1, 0, 64), Shape(3, 2, 63, 17, 41), Shape(2, 3, 130, 257, 96), Shape(2, 2, 40, 33, 128))
TINY = (Shape(1, 1, 5, 7, 4),)
VARIANTS = ("plain", "learned bias", "same_length", "documents", "any ages")
TRAINING = {"enwik8_base": 22, "nvidia_wt103_base": 64, "wt103_base": 60, "wt103_large": 16}  # experiment to lanes
MODES = {"captured": "trainer.compile=auto", "as it is": "trainer.compile=false"}
ENWIK8 = ("experiment=enwik8_base", "eval.batch_size=1", "trainer.precision=bf16-mixed")
READING = {
    "segments of 128, and decoding": ["what=evaluation,decoding", "lengths=[800,3800]", "eval.segment_len=128"],
    "segments as long as memory": ["what=evaluation", "lengths=[3800]", "eval.segment_len=3800"],
}
MEMORIES = "none,cache,window,compressive,expire,tokens,associative,associative_tokens,block_recurrent,knn,titans,mix"
SMALL = (
    "model.n_layer=1 model.d_model=16 model.n_head=2 model.d_head=8 model.d_inner=16 model.vocab_size=40 "
    "model.cutoffs=[] data.segment_len=8 data.batch_size=2 memory.mem_len=8 trainer.precision=32-true "
    "trainer.accelerator=cpu rounds=1"
).split()


class Case(NamedTuple):
    """One attention: a layer, its inputs (leaves), and what is known about the keys."""

    layer: Attention
    leaves: dict[str, Tensor]
    spread: Tensor  # (B, 1, T, P) what is added to scores, without the slots' bias
    mask: Mask  # the same, for backends that do not spread it out
    facts: dict[str, Tensor | None]
    oldest: int


def main() -> int:
    options = parse()
    torch.utils.deterministic.fill_uninitialized_memory = False  # it would be timed too
    check = Check(options)
    for part in options.parts:
        check.attempt(part, getattr(check, part))
    check.report()
    return int(any(not row["right"] for row in check.found["correctness"]))


def parse() -> argparse.Namespace:
    """What was typed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="correctness,attention,reading,tests", help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--budget", type=float, default=440.0, help="seconds for all parts together")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--shapes", default="", help="indices of the six shapes, or sizes like 8x8x128x1024x32")
    parser.add_argument("--ways", default=",".join(WAYS), help="backends to time")
    parser.add_argument("--lanes", type=int, default=0, help="lanes of the six shapes; 0: those of the published runs")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="of what is timed")
    parser.add_argument("--out", help="JSON file for everything that was found")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU")
    options = parser.parse_args()
    options.parts = [part for part in PARTS if part in options.parts.split(",")]
    options.ways = options.ways.split(",")
    if options.dry_run:
        options.device, options.ways = "cpu", ["triton", "triton in order", "shift"]
    wanted = [text for text in options.shapes.split(",") if text] or [str(index) for index in range(len(SIX))]
    shapes = TINY if options.dry_run else tuple(shape_of(text) for text in wanted)
    options.shapes = tuple(shape._replace(lanes=options.lanes or shape.lanes) for shape in shapes)
    return options


def shape_of(text: str) -> Shape:
    """One of the six by its index, or B x H x T x M x K."""
    return Shape(*(int(size) for size in text.split("x"))) if "x" in text else SIX[int(text)]


class Check:
    """Runs the parts, and keeps what they find."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.device = options, torch.device(options.device)
        self.end = time.monotonic() + options.budget
        self.dtype = getattr(torch, options.dtype)
        self.found: dict[str, Any] = {part: [] for part in PARTS} | {"errors": [], "machine": machine(self.device)}

    def attempt(self, name: str, work: Callable[[], None], *, needs: float = 5.0) -> None:
        """Does something that may fail, or find less time left than it needs, without harm to what follows."""
        if time.monotonic() + needs > self.end:
            self.found["errors"].append({"at": name, "error": "no time left"})
            return
        try:
            work()
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            self.found["errors"].append({"at": name, "error": text[:2000], "trace": traceback.format_exc()[-3000:]})
            print(f"FAILED {name}: {text.splitlines()[0][:200]}", flush=True)
        release(self.device)

    # ---- correctness

    def correctness(self) -> None:
        """Outputs and gradients of every backend, against float64."""
        dtypes = (torch.float32,) if self.options.dry_run else (torch.bfloat16, torch.float32)
        shapes = TINY if self.options.dry_run else (*(shape._replace(lanes=2) for shape in SIX), *ODD)
        for shape in shapes:
            variants = VARIANTS[:1] if shape.tokens >= 150 else VARIANTS[:: 4 if self.options.dry_run else 1]
            for variant in variants:
                self.attempt(f"correctness {shape} {variant}", lambda s=shape, v=variant: self._right(s, v, dtypes))
        self.attempt("dropout", self._dropout)

    def _right(self, shape: Shape, variant: str, dtypes: Sequence[torch.dtype]) -> None:
        for dtype in dtypes:
            exact = gradients(case_of(shape, variant, dtype, self.device), "reference", torch.float64)
            ways = ("triton", "shift") if self.options.dry_run else WAYS
            for way in ways:
                name = f"{variant} {tuple(shape)} {str(dtype)[6:]} {way}"
                self.attempt(name, lambda w=way, n=name, d=dtype, e=exact: self._one(shape, variant, d, w, n, e))

    def _one(
        self, shape: Shape, variant: str, dtype: torch.dtype, way: str, name: str, exact: dict[str, Tensor]
    ) -> None:
        found = gradients(case_of(shape, variant, dtype, self.device), way, dtype)
        errors = {part: distance(found.get(part), tensor) for part, tensor in exact.items()}
        limit = 2e-2 if dtype == torch.bfloat16 else 2e-5
        right = max(errors.values()) <= limit
        row = {"at": name, "right": right, "limit": limit, "errors": errors}
        self.found["correctness"].append(row)
        worst = max(errors, key=errors.__getitem__)
        print(f"{'ok   ' if right else 'WRONG'} {name}: {errors[worst]:.1e} ({worst})", flush=True)

    def _dropout(self) -> None:
        """Shares and sizes of what dropout leaves, and gradients with the very mask that forward drew."""
        width = 16 if self.options.dry_run else 64
        shape, rate = Shape(1, 2, width // 2, width - width // 2, width), 0.3
        case = case_of(shape, "plain", torch.float32, self.device, rate=rate)
        case.leaves["v"].data = torch.eye(width, device=self.device).expand_as(case.leaves["v"]).clone()
        torch.manual_seed(3)
        found = gradients(case, "triton", torch.float32)
        full = gradients(case, "shift", torch.float32, train=False)["heads"]
        kept = found["heads"] != 0
        seen = full > 0
        share = float((kept & seen).sum() / seen.sum())
        spread = math.sqrt(rate * (1 - rate) / float(seen.sum()))
        size = distance(found["heads"], torch.where(kept, full / (1 - rate), 0.0))
        exact = gradients(case, "reference", torch.float64, kept=kept / (1 - rate))
        worst = max(distance(found[part], tensor) for part, tensor in exact.items())
        right = abs(share - (1 - rate)) < 5 * spread and size < 1e-5 and worst < 2e-5
        row = {"at": "dropout", "right": right, "kept": share, "expected": 1 - rate, "size": size, "gradients": worst}
        self.found["correctness"].append(row)
        print(f"{'ok   ' if right else 'WRONG'} {row}", flush=True)

    # ---- speed of attention alone

    def attention(self) -> None:
        """Milliseconds and peak MiB of forward and backward."""
        for shape in self.options.shapes:
            for way in [*self.options.ways, "no positions"]:
                self.attempt(f"attention {tuple(shape)} {way}", lambda s=shape, w=way: self._timed(s, w), needs=10.0)

    def _timed(self, shape: Shape, way: str) -> None:
        case = case_of(shape, "plain", self.dtype, self.device)
        step = bound(case) if way == "no positions" else step_of(case, way)
        row = {"shape": tuple(shape), "way": way, **measured(step, self.device, quick=self.options.dry_run)}
        if way.startswith("triton") and self.device.type == "cuda":
            row["kernels_us"] = kernel_times(step)
        self.found["attention"].append(row)
        print(f"{tuple(shape)!s:26} {way:16} {row['ms']:9.3f} ms {row['mib']:9.0f} MiB", flush=True)

    # ---- how the kernels are cut

    def tune(self) -> None:
        """The kernels in tiles of several sizes."""
        from txl_lightning.model.kernels.launch import Tiles

        tries = [
            (64, 4, 8, 2),
            (64, 4, 4, 2),
            (64, 8, 8, 1),
            (64, 4, 8, 3),
            (32, 4, 4, 2),
            (32, 2, 4, 3),
            (128, 8, 8, 1),
        ]
        tries = [(16, 4, 4, 1)] if self.options.dry_run else tries
        for shape in self.options.shapes:
            for cut in tries:
                name = f"tune {tuple(shape)} {cut}"
                self.attempt(name, lambda s=shape, c=cut: self._cut(s, Tiles(*c)), needs=20.0)

    def _cut(self, shape: Shape, tiles: Any) -> None:
        from txl_lightning.model.kernels.launch import tiles_as

        with tiles_as(tiles):
            step = step_of(case_of(shape, "plain", self.dtype, self.device), "triton")
            row = {"shape": tuple(shape), "tiles": tuple(tiles), **measured(step, self.device, quick=True)}
            if self.device.type == "cuda":
                row["kernels_us"] = kernel_times(step)
        self.found["tune"].append(row)
        print(f"{tuple(shape)!s:26} {tuple(tiles)!s:14} {row['ms']:9.3f} ms {row.get('kernels_us', '')}", flush=True)

    # ---- what `txl bench` measures

    def training(self) -> None:
        """Tokens per second of whole training steps of four models."""
        for name, lanes in list(TRAINING.items())[: 1 if self.options.dry_run else None]:
            for mode, key in MODES.items():
                keys = [f"experiment={name}", f"data.batch_size={lanes}", "trainer.precision=bf16-mixed", key]
                self._bench("training", f"{name}, {mode}", [*keys, "what=training"], needs=60.0)

    def reading(self) -> None:
        """Tokens per second of evaluation, segment by segment and layer by layer, and of decoding."""
        for name, keys in READING.items():
            self._bench("reading", name, [*ENWIK8, *keys], needs=40.0)

    def overhead(self) -> None:
        """What the trainer adds to a bare loop, as a share of a step."""
        self._bench("overhead", "enwik8_base", [*ENWIK8, "what=overhead"], needs=60.0)

    def memories(self) -> None:
        """Every memory with the default model, as it is: a compilation of each would take minutes."""
        names = "none,cache" if self.options.dry_run else MEMORIES
        keys = [f"memory={names}", "what=training,evaluation", "trainer.compile=false"]
        self._bench("memories", "the default model", keys, needs=60.0)

    def _bench(self, part: str, name: str, keys: list[str], *, needs: float) -> None:
        self.attempt(f"{part} {name}", lambda: self._benched(part, name, keys), needs=needs)

    def _benched(self, part: str, name: str, keys: list[str]) -> None:
        from txl_lightning.cli import main as txl

        if self.options.dry_run:
            small = [key for key in SMALL if part != "memories" or not key.startswith("memory")]
            names = [key.partition("=")[0] for key in small]
            keys = [key.replace("[800,3800]", "[16]").replace("3800", "16") for key in keys]
            keys = [key for key in keys if key.partition("=")[0] not in names] + small
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "bench.json"
            code = txl(["bench", *keys, f"out={out}"])
            if code:
                raise RuntimeError(f"txl bench {' '.join(keys)} ended with {code}")
            self.found[part].append({"name": name, "keys": keys, **json.loads(out.read_text())})

    def tests(self) -> None:
        """The tests that need a GPU, within the time that is left; without one they are only collected."""
        more = ["--collect-only"] if self.options.dry_run else []
        run = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", *more, str(ROOT / "tests")]
        done = subprocess.run(run, cwd=ROOT, timeout=max(10.0, self.end - time.monotonic()), check=False)
        self.found["correctness"].append({"at": "pytest -m gpu", "right": done.returncode == 0})
        self.found["tests"].append({"exit_code": done.returncode})

    def report(self) -> None:
        """What failed, and everything as JSON."""
        for error in self.found["errors"]:
            print(f"not done: {error['at']}: {error['error'].splitlines()[0][:160]}")
        n_wrong = sum(not row["right"] for row in self.found["correctness"])
        print(f"{len(self.found['correctness'])} comparisons, {n_wrong} wrong, {len(self.found['errors'])} not done")
        if self.options.out:
            Path(self.options.out).write_text(json.dumps(self.found, indent=1, default=str) + "\n")


# ---- one attention


def case_of(shape: Shape, variant: str, dtype: torch.dtype, device: torch.device, *, rate: float = 0.0) -> Case:
    """The same numbers each time; `variant` says what is known about the keys."""
    lanes, heads, tokens, memory, width = shape
    generator = torch.Generator(device=device).manual_seed(1)

    def drawn(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device)

    torch.manual_seed(2)
    layer = Attention(ModelConfig(d_model=64, n_head=heads, d_head=width, dropatt=rate)).to(device, dtype)
    sizes = {"q": (lanes, heads, tokens, width), "u": (heads, width), "w": (heads, width)}
    sizes |= dict.fromkeys("kv", (lanes, heads, memory + tokens, width))
    leaves = {name: drawn(*size).to(dtype).requires_grad_() for name, size in sizes.items()}
    with torch.no_grad():
        layer.position.r.weight.copy_(drawn(heads * width, 64) / 8)
    facts = facts_of(variant, lanes, tokens, memory, device)
    limit = memory // 2 + 1 if variant == "same_length" else None
    slots = torch.zeros(1, 1, 1, memory, device=device)
    if variant in ("learned bias", "any ages"):
        slots = drawn(lanes, 1, 1, memory)
        slots[0, ..., : memory // 2] = MASKED
    leaves["bias"] = slots.to(dtype).requires_grad_(variant in ("learned bias", "any ages"))
    mask = Mask(leaves["bias"], None, facts["document"], limit, limit)
    return Case(layer, leaves, spread_out(mask, facts, tokens, memory), mask, facts, max(memory, 2 * memory))


def facts_of(variant: str, lanes: int, tokens: int, memory: int, device: torch.device) -> dict[str, Tensor | None]:
    """Ages with gaps and equal ones, slots without position and sinks; or documents; or nothing special."""
    facts: dict[str, Tensor | None] = dict.fromkeys(("age", "positioned", "farthest", "document"))
    slot = torch.arange(memory, device=device)
    if variant == "any ages":
        facts["age"] = torch.stack([(2 * memory - 2 * slot + lane) // (1 + lane % 2) for lane in range(lanes)])
        facts["age"] = facts["age"].clamp(1, max(1, 2 * memory))
        facts["positioned"] = slot % 5 != 1
        facts["farthest"] = torch.where(slot < 3, memory + slot, torch.iinfo(torch.int32).max)
    if variant == "documents":
        facts["document"] = (
            torch.arange(tokens, device=device).expand(lanes, -1).div(7 + tokens // 3, rounding_mode="floor")
        )
        facts["document"] = facts["document"].contiguous()
    return facts


def spread_out(mask: Mask, facts: dict[str, Tensor | None], tokens: int, memory: int) -> Tensor:
    """(1|B, 1, T, P) 0 where a token sees a key, -inf elsewhere."""
    assert mask.slots is not None
    device = mask.slots.device
    step, far = torch.arange(tokens, device=device), math.inf
    age = facts["age"] if facts["age"] is not None else torch.arange(memory, 0, -1, device=device)[None]
    to_slots = (age[:, None] + step[:, None]).float()
    if facts["positioned"] is not None:
        to_slots = to_slots.where(facts["positioned"], 0.0)
    to_own = (step[:, None] - step)[None].expand(len(to_slots), -1, -1)
    seen = torch.cat(
        [to_slots <= (mask.slot_limit or far), (to_own >= 0) & (to_own <= (mask.own_limit or far))], dim=-1
    )
    if mask.document is not None:
        own = mask.document[:, :, None] == mask.document[:, None]
        seen = seen & torch.cat([own[..., :1].expand(-1, -1, memory), own], dim=-1)
    return torch.zeros(seen.shape, device=device).masked_fill(~seen, -math.inf)[:, None]


def attend(case: Case, way: str, dtype: torch.dtype, *, kept: Tensor | None = None) -> Tensor:
    """Heads' outputs."""
    leaves = {name: leaf.to(dtype) for name, leaf in case.leaves.items()}
    memory = case.mask.slots.shape[-1]  # type: ignore[union-attr]
    plain = "shift" if way == "reference" else way.split()[0]
    whole = None
    if plain != "triton":
        slots = leaves["bias"].expand(len(case.spread), -1, -1, -1) if len(case.spread) > 1 else leaves["bias"]
        added = torch.nn.functional.pad(slots, (0, leaves["q"].shape[2]))
        whole = added + case.spread.to(dtype)
    facts = case.facts
    read = Reading(
        *(leaves["k"], leaves["v"], whole, facts["age"], facts["positioned"], memory, facts["farthest"]),
        case.mask._replace(slots=leaves["bias"]),
    )
    table = distance_table(
        oldest=case.oldest, n_token=leaves["q"].shape[2], ahead=0, d_model=64, clamp_len=-1, device=leaves["q"].device,
        dtype=dtype,
    )  # fmt: skip
    if facts["age"] is None:
        table = table.for_slots(memory, leaves["q"].shape[2])
    case.layer.position.always_reference = way == "reference"
    heads, weights = case.layer.attend(
        leaves["q"], read, table, Biases(leaves["u"], leaves["w"]), way=plain, weights=kept is not None
    )
    return heads if kept is None else (weights * kept) @ leaves["v"]  # type: ignore[operator]


def gradients(
    case: Case, way: str, dtype: torch.dtype, *, train: bool = True, kept: Tensor | None = None
) -> dict[str, Tensor]:
    """Outputs and every gradient, computed in `dtype`; kept: what dropout multiplied the weights with."""
    case.layer.train(train and kept is None).to(dtype)
    torch.use_deterministic_algorithms(way == "triton in order")
    heads = attend(case, way, dtype, kept=kept)
    seed = torch.Generator(device=heads.device).manual_seed(4)
    weight = case.layer.position.r.weight
    wanted = {name: leaf for name, leaf in case.leaves.items() if leaf.requires_grad and leaf.numel()} | {"r": weight}
    given = torch.randn(heads.shape, generator=seed, device=heads.device).to(case.leaves["q"].dtype).to(dtype)
    found = torch.autograd.grad(heads, list(wanted.values()), given)
    torch.use_deterministic_algorithms(False)
    return {"heads": heads.detach(), **dict(zip(wanted, found, strict=True))}


def distance(found: Tensor | None, exact: Tensor) -> float:
    """Relative error in the Euclidean norm; infinite where something is missing or not a number."""
    if found is None:
        return math.inf
    error = float((found.double() - exact.double()).norm() / exact.double().norm().clamp(min=1e-30))
    return error if math.isfinite(error) else math.inf


def step_of(case: Case, way: str) -> Callable[[], object]:
    """Forward and backward of one backend."""
    dtype = case.leaves["q"].dtype
    heads = attend(case, way, dtype)
    given = torch.randn_like(heads)
    wanted = [leaf for leaf in case.leaves.values() if leaf.requires_grad] + [case.layer.position.r.weight]

    def step() -> object:
        torch.use_deterministic_algorithms(way == "triton in order")
        found = torch.autograd.grad(attend(case, way, dtype), wanted, given)
        torch.use_deterministic_algorithms(False)
        return found

    return step


def bound(case: Case) -> Callable[[], object]:
    """Flash attention over the same keys without any positions: what the hardware allows."""
    from torch.nn.attention.bias import causal_lower_right

    q, k, v = (case.leaves[name] for name in "qkv")
    mask = causal_lower_right(q.shape[2], k.shape[2])
    given = torch.randn_like(q)

    def step() -> object:
        heads = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return torch.autograd.grad(heads, [q, k, v], given)

    return step


def measured(step: Callable[[], object], device: torch.device, *, quick: bool) -> dict[str, float]:
    """Median milliseconds (on the CPU: of its time, all threads), and the highest MiB in use, inputs included."""
    for _ in range(1 if quick else 3):
        step()
    if device.type == "cuda":
        from triton.testing import do_bench

        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        mib = torch.cuda.max_memory_allocated() / 2**20
        time_ms = do_bench(step, warmup=20, rep=60 if quick else 200, return_mode="median")
        return {"ms": float(time_ms), "mib": mib}
    times = []
    for _ in range(1 if quick else 7):
        start = time.process_time()
        step()
        times.append(1000 * (time.process_time() - start))
    return {"ms": statistics.median(times), "mib": math.nan}


def kernel_times(step: Callable[[], object]) -> dict[str, float]:
    """Microseconds of each of our kernels, the mean of three runs."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(3):
            step()
        torch.cuda.synchronize()
    found = {event.key: event.device_time_total / 3 for event in seen.key_averages()}
    ours = {name: value for name, value in found.items() if name.endswith("_kernel") and "at::" not in name}
    return {**ours, "all": sum(found.values())}


# ---- the machine


def release(device: torch.device) -> None:
    """Gives memory back, and forgets a failure."""
    torch.use_deterministic_algorithms(False)
    if device.type == "cuda":
        torch.cuda.empty_cache()


def machine(device: torch.device) -> dict[str, str]:
    """What the figures were measured on."""
    import triton

    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    return {"device": name, "torch": torch.__version__, "triton": triton.__version__, "python": sys.version.split()[0]}


if __name__ == "__main__":
    sys.exit(main())
