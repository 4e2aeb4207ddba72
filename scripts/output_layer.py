"""The output layer alone on a CPU, forward and backward, beside the plain way: time, largest tensor, most bytes held.

    python scripts/output_layer.py [--threads N] [--tokens N] [--repeats N] [--bf16] [KEY=VALUE ...]

The plain way forms all logits of a cluster at once and searches its tokens with `nonzero`. Both take turns; the median
of the processor time of all threads is given. Targets are drawn as words are (token k as often as 1 / (k + 1)). Keys
are those of the configuration: `experiment=wt103_base`, `model.vocab_size=204`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from txl_lightning.benchmarks.workloads import drawn
from txl_lightning.config import Config, load
from txl_lightning.model.embedding import TokenEmbedding
from txl_lightning.model.softmax import OutputSoftmax
from txl_lightning.training.footprint import LiveBytes

Way = Callable[[OutputSoftmax, Tensor, Tensor], Tensor]


def ours(softmax: OutputSoftmax, hidden_BTD: Tensor, targets_BT: Tensor) -> Tensor:
    """As training does it, the clusters' targets counted beforehand."""
    return softmax.losses(hidden_BTD, targets_BT, counts=softmax.target_counts(targets_BT))


def plain(softmax: OutputSoftmax, hidden_BTD: Tensor, targets_BT: Tensor) -> Tensor:
    """Each cluster's logits at once, for the tokens whose target it has."""
    hidden, target = hidden_BTD.flatten(0, 1), targets_BT.flatten()
    edges = (0, *softmax.cutoffs, softmax.vocab_size)
    if not softmax.cutoffs:
        logits = F.linear(_projected(softmax, 0, hidden), softmax.weights[0], *softmax.biases)
        return F.cross_entropy(logits.float(), target, reduction="none").view_as(targets_BT)
    weight, bias = _rows(softmax, 0, edges[0], edges[1])
    weight = torch.cat([weight, softmax.cluster_weight])
    bias = None if bias is None or softmax.cluster_bias is None else torch.cat([bias, softmax.cluster_bias])
    head = F.linear(_projected(softmax, 0, hidden), weight, bias).float().log_softmax(dim=-1)
    column = target
    for i, cut in enumerate(softmax.cutoffs, start=1):
        column = torch.where(target >= cut, softmax._column(i), column)
    found = head.gather(1, column[:, None])[:, 0]
    for i in range(1, len(edges) - 1):
        index = ((target >= edges[i]) & (target < edges[i + 1])).nonzero()[:, 0]
        logits = F.linear(_projected(softmax, i, hidden[index]), *_rows(softmax, i, edges[i], edges[i + 1]))
        own = logits.float().log_softmax(dim=-1).gather(1, (target[index] - edges[i])[:, None])
        found = found.index_add(0, index, own[:, 0])
    return -found.view_as(targets_BT)


def _rows(softmax: OutputSoftmax, cluster: int, start: int, end: int) -> tuple[Tensor, Tensor | None]:
    whole = len(softmax.weights) == 1
    weight, bias = softmax.weights[0 if whole else cluster], None
    if len(softmax.biases):
        bias = softmax.biases[0 if whole else cluster]
    return (weight[start:end], None if bias is None else bias[start:end]) if whole else (weight, bias)


def _projected(softmax: OutputSoftmax, cluster: int, hidden: Tensor) -> Tensor:
    key = str(cluster)
    return hidden @ softmax.projections[key] if key in softmax.projections else hidden


class Largest(TorchDispatchMode):
    """Numbers in the largest tensor that any operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]
        self.numel = max([self.numel, *sizes])
        return made


class Layer:
    """An output layer with random weights, and what it is given."""

    def __init__(self, config: Config, *, n_token: int, half: bool) -> None:
        torch.manual_seed(config.seed)
        self.softmax, self.half = OutputSoftmax(config.model, TokenEmbedding(config.model)), half
        with torch.no_grad():
            for weight in self.softmax.parameters():
                weight.normal_(0.0, 0.02)
        self.targets_BT = drawn(config, lanes=1, n_token=n_token)
        self.hidden_BTD = torch.randn(1, n_token, config.model.d_model, requires_grad=True)

    def run(self, way: Way) -> Tensor:
        """Forward and backward; the gradient of every weight and of the hidden states is left."""
        for leaf in (self.hidden_BTD, *self.softmax.parameters()):
            leaf.grad = None
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.half):
            losses_BT = way(self.softmax, self.hidden_BTD, self.targets_BT)
        losses_BT.mean().backward()
        return losses_BT.detach()

    def held(self, way: Way) -> tuple[int, int]:
        """Numbers in the largest tensor, and the most bytes held beside weights and hidden states."""
        largest, live = Largest(), LiveBytes()
        with largest:
            self.run(way)
        self.hidden_BTD.grad = None
        self.softmax.zero_grad()
        live.start([self.hidden_BTD, self.targets_BT, *self.softmax.parameters()])
        with live:
            self.run(way)
        return largest.numel, live.peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--bf16", action="store_true", help="products in bfloat16, as trainer.precision=bf16-mixed")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    layer = Layer(load([*args.overrides, "trainer.accelerator=cpu"]), n_token=args.tokens, half=args.bf16)
    ways: dict[str, Way] = {"ours": ours, "plain": plain}
    spent: dict[str, list[float]] = {name: [] for name in ways}
    found = {name: layer.run(way) for name, way in ways.items()}  # not timed: memory is asked for
    print(f"largest difference of a loss: {float((found['ours'] - found['plain']).abs().max()):.1e}")
    for _ in range(args.repeats):
        for name, way in ways.items():
            start = time.process_time()
            layer.run(way)
            spent[name].append(1000 * (time.process_time() - start))
    medians = {name: statistics.median(times) for name, times in spent.items()}
    for name, way in ways.items():
        numel, n_byte = layer.held(way)
        print(f"{name:6} {medians[name]:9.2f} ms, largest tensor {numel:,} numbers, held {n_byte / 2**20:,.0f} MiB")
    print(f"plain takes {medians['plain'] / medians['ours']:.2f} times as long")


if __name__ == "__main__":
    main()
