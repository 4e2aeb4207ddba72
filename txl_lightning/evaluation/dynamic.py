"""Dynamic evaluation: the weights follow the text that is scored.

Krause et al. 2018 (arXiv:1709.07432) and, of Transformer-XL, 2019 (arXiv:1904.08378). Each segment is scored first, and
then one step is made on its loss, so no target was seen before it is scored:

    sgd    w <- w - lr g                    + decay (w_0 - w)
    rms    w <- w - lr g / (sqrt(s) + eps)  + min(1, decay r) (w_0 - w),    r = sqrt(s) / mean(sqrt(s))

g is the gradient of the mean loss over the targets of the segment's lanes, w_0 are the trained weights, s the mean of
g^2 over segments of training text at w_0; the mean of sqrt(s) is over all weights. In float32.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import torch
from torch import Tensor

from txl_lightning.config import EvalConfig
from txl_lightning.evaluation.losses import on_device
from txl_lightning.model.transformer import TransformerXL
from txl_lightning.types import Batch, detach


class Follower:
    """Weights that follow a text.

    Args:
        parameters: the trained weights, changed in place.
        keys: what `eval.dynamic…` says.
        squares: s for each of them; None: sgd.
    """

    def __init__(self, parameters: Sequence[Tensor], keys: EvalConfig, *, squares: Sequence[Tensor] | None) -> None:
        self.parameters = list(parameters)
        self.trained = [parameter.detach().clone() for parameter in self.parameters]
        told = keys.dynamic_keys()
        assert told is not None, "eval.dynamic=none"
        lr = told["lr"]
        self.rates: list[Tensor | float] = [lr] * len(self.parameters)
        self.pulls: list[Tensor | float] = [keys.dynamic_decay] * len(self.parameters)
        if squares is not None:
            roots = [square.sqrt() for square in squares]
            mean = sum(root.sum() for root in roots) / sum(root.numel() for root in roots)
            self.rates = [lr / (root + keys.dynamic_eps) for root in roots]
            self.pulls = [(keys.dynamic_decay * root / mean).clamp(max=1.0) for root in roots]

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor | None]) -> None:
        """One step; None stands for a gradient of zeros."""
        parts = zip(self.parameters, self.trained, self.rates, self.pulls, gradients, strict=True)
        for parameter, trained, rate, pull, gradient in parts:
            change = pull * (trained - parameter)
            parameter.add_(change if gradient is None else change - rate * gradient)


def mean_squares(model: TransformerXL, batches: Iterable[Batch], *, parameters: Sequence[Tensor]) -> list[Tensor]:
    """s: the mean of each weight's squared gradient over segments, with memory carried along.

    Args:
        model: in evaluation mode.
        batches: segments of training text in order.
        parameters: the weights.
    """
    squares, count = [torch.zeros_like(parameter) for parameter in parameters], 0
    for _, _, gradients in _read(model, batches, parameters):
        count += 1
        for square, gradient in zip(squares, gradients, strict=True):
            if gradient is not None:
                square.addcmul_(gradient, gradient)
    return [square / max(count, 1) for square in squares]


def dynamic_loss(
    model: TransformerXL, batches: Iterable[Batch], keys: EvalConfig, *, training: Iterable[Batch] = ()
) -> tuple[float, int]:
    """Summed loss in nats and number of targets of a text whose segments are learned from once they are scored.

    Args:
        model: the trained weights; left as they are.
        batches: the text's segments in order.
        keys: what `eval.dynamic…` says.
        training: training text, for `eval.dynamic=rms`.
    """
    model = copy.deepcopy(model).float().eval()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    squares = None
    if keys.dynamic == "rms":
        squares = mean_squares(model, islice(training, keys.dynamic_segments), parameters=parameters)
    follower = Follower(parameters, keys, squares=squares)
    nll, count = 0.0, 0
    for loss, n_target, gradients in _read(model, batches, parameters):
        nll, count = nll + loss * n_target, count + n_target
        follower.step(gradients)
    return nll, count


def _read(
    model: TransformerXL, batches: Iterable[Batch], parameters: Sequence[Tensor]
) -> Iterator[tuple[float, int, tuple[Tensor | None, ...]]]:
    """Of each segment with targets: mean loss in nats, their number, the gradients; memory is carried along."""
    state = None
    for batch in batches:
        batch = on_device(batch, model.device)
        state = state if state is not None else model.init_state(len(batch.tokens_BT))
        out = model(batch.tokens_BT, state, batch.segment, batch.targets_BT)
        assert out.losses_BT is not None
        state, n_target = detach(out.state), int(batch.segment.length.sum())
        if n_target and batch.n_target:  # else all lanes have ended, or are being warmed
            loss = out.losses_BT.sum() / n_target
            yield float(loss.detach()), n_target, torch.autograd.grad(loss, list(parameters), allow_unused=True)
