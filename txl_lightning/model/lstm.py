"""A stacked LSTM on the same lanes: the baseline whose state is its memory.

Hochreiter & Schmidhuber 1997, with a forget gate (Gers et al. 2000). Per layer and token, with gates i, f, g, o:

    i, f, g, o = W x_t + U h_{t-1} + b
    c_t = sigmoid(f) c_{t-1} + sigmoid(i) tanh(g)
    h_t = sigmoid(o) tanh(c_t)

Embedding, softmax and dropout are the Transformer-XL's. Between segments no gradient flows. Tokens are read one after
the other in plain torch, so that lanes may end, and documents begin, anywhere in a segment; torch's fused LSTM, which
the tests compare with, knows neither.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from txl_lightning.config import Config
from txl_lightning.model.embedding import TokenEmbedding
from txl_lightning.model.parts import make_dropout
from txl_lightning.model.softmax import OutputSoftmax
from txl_lightning.model.tables import Tables
from txl_lightning.model.transformer import ModelOutput, initialise
from txl_lightning.types import Segment, State, lane_where


class LSTMLayer(nn.Module):
    """One layer. Gates stand in the order i, f, g, o, as torch has them; b is 1 at the forget gate at first."""

    def __init__(self, width: int, *, bias: bool) -> None:
        super().__init__()
        self.of_input = nn.Linear(width, 4 * width, bias=bias)
        self.of_state = nn.Linear(width, 4 * width, bias=False)

    def forward(self, x_BTD: Tensor, h_BD: Tensor, c_BD: Tensor, segment: Segment) -> tuple[Tensor, Tensor, Tensor]:
        """Outputs (B, T, D) and the state after each lane's last token."""
        real_BT, begins_BT = segment.mask(x_BTD.shape[1]), _begins(segment)
        outputs = []
        for place, given in enumerate(self.of_input(x_BTD).unbind(dim=1)):
            if begins_BT is not None:
                goes_on = ~begins_BT[:, place, None]
                h_BD, c_BD = h_BD * goes_on, c_BD * goes_on
            i, f, g, o = (given + self.of_state(h_BD)).chunk(4, dim=-1)
            c = f.sigmoid() * c_BD + (i.sigmoid() * g.tanh()).to(c_BD.dtype)
            h = o.sigmoid() * c.tanh().to(o.dtype)
            outputs.append(h)
            real_B = real_BT[:, place, None]
            h_BD, c_BD = torch.where(real_B, h, h_BD), torch.where(real_B, c, c_BD)
        return torch.stack(outputs, dim=1), h_BD, c_BD


def _begins(segment: Segment) -> Tensor | None:
    """(B, T) where a document begins inside the segment; None: nowhere."""
    if segment.document is None:
        return None
    return segment.document.diff(dim=1, prepend=segment.document[:, :1]) > 0


class LSTM(nn.Module):
    """What training, evaluation and generation need of a model, as `TransformerXL` has it.

    Args:
        config: the whole configuration; its memory is `none`.

    The state holds `age` (B,), `layers.<i>.h` and, always in float32, `layers.<i>.c`, (B, D) each.
    """

    needs_whole_segments = False

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config, self.run_config = config.model, config
        self.vocab = None
        self.embedding = TokenEmbedding(self.config)
        width, bias = self.config.d_model, self.config.bias
        self.layers = nn.ModuleList(LSTMLayer(width, bias=bias) for _ in range(self.config.n_layer))
        self.softmax = OutputSoftmax(self.config, self.embedding)
        self.dropout = make_dropout(self.config)
        initialise(self, std=self.config.init_std, proj_std=self.config.proj_init_std)
        for layer in self.layers if bias else ():
            layer.of_input.bias.data[width : 2 * width] = 1.0  # type: ignore[union-attr,operator]

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embedding.tables[0].weight.device  # type: ignore[return-value]

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self.embedding.tables[0].weight.dtype  # type: ignore[return-value]

    def init_state(
        self,
        batch_size: int,
        *,
        form: str = "hidden",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> State:
        """The state of lanes that have read nothing: zeros. `form` makes no difference."""
        place, kind = torch.device(device or self.device), dtype or self.dtype
        state: State = {"age": torch.zeros(batch_size, dtype=torch.int64, device=place)}
        wide = torch.promote_types(kind, torch.float32)
        for index in range(len(self.layers)):
            for name, own in (("h", kind), ("c", wide)):
                state[f"layers.{index}.{name}"] = torch.zeros(batch_size, self.config.d_model, dtype=own, device=place)
        return state

    def forward(
        self,
        tokens_BT: Tensor,
        state: State,
        segment: Segment | None = None,
        targets_BT: Tensor | None = None,
        *,
        tables: Tables | None = None,
        donate: bool = False,
        target_counts: Sequence[int] | None = None,
    ) -> ModelOutput:
        """Read one segment of every lane; as `TransformerXL.forward`.

        There are no distances to keep in `tables`, and a state is so small that `donate` spares nothing: it is kept.
        """
        segment = segment if segment is not None else Segment.full(tokens_BT)
        x = self.dropout(self.embedding(tokens_BT))
        new: State = {}
        for index, layer in enumerate(self.layers):
            names = [f"layers.{index}.{name}" for name in ("h", "c")]
            h, c = (lane_where(segment.reset, torch.zeros_like(state[name]), state[name]) for name in names)
            x, h, c = layer(x, h, c, segment)
            x = self.dropout(x)
            new |= {name: part.to(state[name].dtype) for name, part in zip(names, (h, c), strict=True)}
        new["age"] = segment.since_start(torch.where(segment.reset, 0, state["age"]))
        read_B = segment.length > 0
        after = {name: lane_where(read_B, new[name], before) for name, before in state.items()}
        losses = None
        if targets_BT is not None:
            losses = self.softmax.losses(x, targets_BT, counts=target_counts)
            losses = torch.where(segment.mask(tokens_BT.shape[1]), losses, 0.0)
        return ModelOutput(losses, x, after, {}, {})

    def log_probs(self, hidden_BTD: Tensor) -> Tensor:
        """(B, T, V) log-probabilities, in nats, of the token after each position."""
        return self.softmax.log_probs(hidden_BTD)

    def memory_parts(self) -> list[tuple[str, nn.Module]]:
        """None but its own state."""
        return []
