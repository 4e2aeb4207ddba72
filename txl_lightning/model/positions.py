"""How the scores of a layer know where a key stands: one class per value of `model.position`.

    transformer_xl      four terms over the distance d = i - j, embedded as a sinusoid (Dai et al. 2019, section 3.3):
                            A(i, j) = q_i . k_j  +  q_i . r_d  +  u . k_j  +  v . r_d      with r_d = W_r R_d
                                      (a) content   (b) position  (c) and (d): learned biases of each head
    shaw                a learned row and bias per distance, clipped (Shaw et al. 2018 with the authors' bias terms):
                            A(i, j) = (q_i + u) . k_j  +  q_i . w_d  +  b_d
    rotary              queries and keys are turned by an angle per place (Su et al. 2021, arXiv:2104.09864)
    absolute            a sinusoid is added to the embeddings (Vaswani et al. 2017)
    absolute_per_layer  a learned row is added to each layer's input
    none                content alone

The first three and `none` see distances only, so they can read a memory. The absolute ones number the tokens of one
segment, the newest 0 as in the authors' code, and cannot say where a memory's tokens stand.

W is the number of rows in a distance table, S the number of slots, P = S + T the number of keys.
"""

from __future__ import annotations

import math
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from txl_lightning.config import ModelConfig


class DistanceTable(NamedTuple):
    """Embedded distances first, first-1, ... in falling order. Negative distances look like 0."""

    rows_WD: Tensor
    first: int  # distance of row 0
    ahead: int  # how many negative distances the table ends with
    projected_WHK: Tensor | None = None  # what a layer makes of the rows, where it is kept (`model.tables`)

    def for_slots(self, age: int, n_token: int) -> DistanceTable:
        """The part that a layer needs whose oldest slot has this age."""
        return self.part(first=age + n_token, ahead=self.ahead)

    def part(self, *, first: int, ahead: int) -> DistanceTable:
        """The rows from one distance on, with fewer negative ones."""
        rows = slice(self.first - first, self.first + ahead + 1)
        projected = None if self.projected_WHK is None else self.projected_WHK[rows]
        return DistanceTable(self.rows_WD[rows], first, ahead, projected)

    def same_place(self, other: DistanceTable) -> bool:
        """Whether both are the same numbers in memory."""
        pairs = zip((self.rows_WD, self.projected_WHK), (other.rows_WD, other.projected_WHK), strict=True)
        return all(a is b or (a is not None and b is not None and a.data_ptr() == b.data_ptr()) for a, b in pairs)

    def distances(self) -> Tensor:
        """(W,) int64 distance of each row."""
        device = self.rows_WD.device
        return torch.arange(self.first, -self.ahead - 1, -1, device=device).clamp(min=0)


class Biases(NamedTuple):
    """u and v of the paper, (H, K) each; None: its term is off."""

    u_HK: Tensor | None
    v_HK: Tensor | None


class Mask(NamedTuple):
    """What is added to the scores, not spread out over all pairs: for backends that store nothing of that size."""

    slots: Tensor | None  # (1|B, 1|H, 1|T, S) additive; None: there is no slot
    own: Tensor | None = None  # (1|B, 1, T, T) additive, of the tokens among themselves; None: causal
    document: Tensor | None = None  # (B, T) a token sees its own document; slots belong to that of token 0
    slot_limit: int | None = None  # largest distance at which a slot that has a position is seen; None: any
    own_limit: int | None = None  # the same for tokens


class Reading(NamedTuple):
    """Keys and values a segment attends to, slots first, and what is known about each pair."""

    k_BHPK: Tensor
    v_BHPK: Tensor
    bias: Tensor | None  # (1|B, 1|H, T, P) additive; None: `mask` has it
    age: Tensor | None  # (1|B, S) ages where they are not contiguous
    positioned: Tensor | None  # (S,) bool; False: no position term
    n_slot: int
    farthest: Tensor | None = None  # (S,) int64 distance at which a slot's distance stops growing
    mask: Mask | None = None
    # keys and values (B, H, S, K) of the slots where they were not joined with the segment's: then P is T above, and
    # what is added to the slots' scores stands in `mask`
    before: tuple[Tensor, Tensor] | None = None

    @property
    def contiguous(self) -> bool:
        """Whether key p of query t has distance S + t - p, for all of them."""
        return self.age is None and self.positioned is None and self.farthest is None

    def ages(self) -> Tensor:
        """(1|B, S) int64 tokens from each slot to the segment's first token."""
        if self.age is not None:
            return self.age
        return torch.arange(self.n_slot, 0, -1, device=self.k_BHPK.device)[None]

    def positioned_keys(self) -> Tensor | None:
        """(P,) bool: which keys have a position; None: all."""
        if self.positioned is None:
            return None
        own = self.positioned.new_ones(self.k_BHPK.shape[2] - self.n_slot)
        return torch.cat([self.positioned, own])


def sinusoid(distance_W: Tensor, *, d_model: int, clamp_len: int = -1, dtype: torch.dtype = torch.float32) -> Tensor:
    """(W, D) embeddings of integer distances, computed in at least float32.

    R_d = [sin(d f_0) .. sin(d f_(D/2-1)), cos(d f_0) .. cos(d f_(D/2-1))] with f_i = 10000^(-2i/D): halves, not
    interleaved, as in the authors' code. Frequencies are float32 numbers even in float64, as everywhere else: published
    weights were trained with them.

    Args:
        distance_W: (W,) integer distances in tokens.
        d_model: D, even.
        clamp_len: distances beyond it count as it; -1: off.
        dtype: of the result.
    """
    if clamp_len > 0:
        distance_W = distance_W.clamp(max=clamp_len)
    wide = torch.promote_types(dtype, torch.float32)
    angle = distance_W.to(wide)[:, None] * frequencies(d_model, device=distance_W.device).to(wide)
    return torch.cat([angle.sin(), angle.cos()], dim=-1).to(dtype)


def frequencies(width: int, *, device: torch.device) -> Tensor:
    """(width / 2,) float32: 10000^(-2i/width)."""
    exponent = torch.arange(0, width, 2, dtype=torch.float32, device=device) / width
    return 1.0 / 10000.0**exponent


def distance_table(
    *, oldest: int, n_token: int, ahead: int, d_model: int, clamp_len: int, device: torch.device, dtype: torch.dtype
) -> DistanceTable:
    """Table for n_token tokens that read slots of age up to `oldest`.

    It starts one distance above the largest that occurs (oldest + n_token - 1): the relative shift needs that row as a
    pad. `ahead` negative distances follow 0 where tokens may look forward (memory tokens).
    """
    first = oldest + n_token
    distance = torch.arange(first, -ahead - 1, -1, device=device)
    rows = sinusoid(distance.clamp(min=0), d_model=d_model, clamp_len=clamp_len, dtype=dtype)
    return DistanceTable(rows, first, ahead)


def distance_rows(read: Reading, table: DistanceTable, *, n_token: int) -> Tensor:
    """(1|B, T, P) row of the distance table for every pair of query and key."""
    steps = torch.arange(n_token, device=table.rows_WD.device)
    to_slots = read.ages()[:, None] + steps[:, None]  # (1|B, T, S)
    if read.farthest is not None:
        to_slots = to_slots.minimum(read.farthest)
    to_own = (steps[:, None] - steps)[None].expand(to_slots.shape[0], -1, -1)
    distance = torch.cat([to_slots, to_own], dim=-1)
    return (table.first - distance).clamp(min=0, max=table.first + table.ahead)


def shifted_scores(content_BHTK: Tensor, k_BHPK: Tensor, by_row_BHTW: Tensor, *, scale: float) -> Tensor:
    """(B, H, T, P) scaled scores of contiguous distances: key p of query t has distance S + t - p.

    Row 0 of the table is distance P, one more than occurs: with it each query's scores start one place further left
    than the row above, so dropping the first T and viewing rows of length W - 1 lines up equal keys, without a copy.
    Entries above the diagonal are only right if the table ends with T - 1 negative distances (`DistanceTable.ahead`);
    else they are garbage to be masked.

    Args:
        content_BHTK: queries of the content terms.
        k_BHPK: keys.
        by_row_BHTW: position scores of every query with every row of the table.
        scale: factor of the sum.
    """
    batch, n_head, n_token, n_row = by_row_BHTW.shape
    width, n_key = k_BHPK.shape[3], k_BHPK.shape[2]
    position = by_row_BHTW.flatten(-2)[..., n_token:].unflatten(-1, (n_token, n_row - 1))[..., :n_key]
    content = content_BHTK.reshape(-1, n_token, width)
    keys = k_BHPK.reshape(-1, n_key, width).transpose(1, 2)
    scores = torch.baddbmm(position.reshape(-1, n_token, n_key), content, keys, beta=scale, alpha=scale)
    return scores.view(batch, n_head, n_token, n_key)


def gathered_scores(
    content_BHTK: Tensor, k_BHPK: Tensor, by_row_BHTW: Tensor, *, read: Reading, table: DistanceTable, scale: float
) -> Tensor:
    """(B, H, T, P) scaled scores of any distances: each pair looks its row up."""
    row = distance_rows(read, table, n_token=content_BHTK.shape[2])
    position = by_row_BHTW.gather(-1, row[:, None].expand(*by_row_BHTW.shape[:3], -1))
    if (positioned := read.positioned_keys()) is not None:
        position = position * positioned
    return (content_BHTK @ k_BHPK.transpose(-1, -2) + position) * scale


def reference_terms(
    q_BHTK: Tensor,
    k_BHPK: Tensor,
    r_WHK: Tensor | None,
    biases: Biases,
    *,
    row: Tensor,
    positioned: Tensor | None = None,
) -> dict[str, Tensor]:
    """The four terms by letter, before scaling; each can be broadcast to (B, H, T, P).

    Args:
        q_BHTK, k_BHPK: queries and keys.
        r_WHK: projected distances; None: neither (b) nor (d).
        biases: u and v; None: its term is left out.
        row: (1|B, T, P) int64, the row of r that belongs to query t and key p.
        positioned: (P,) bool; where False terms (b) and (d) are 0.
    """
    parts = {"a": torch.einsum("bhtk,bhpk->bhtp", q_BHTK, k_BHPK)}
    if biases.u_HK is not None:
        parts["c"] = torch.einsum("hk,bhpk->bhp", biases.u_HK, k_BHPK)[:, :, None]
    if r_WHK is None:
        return parts
    index = row[:, None].expand(q_BHTK.shape[0], q_BHTK.shape[1], -1, -1)
    by_row = torch.einsum("bhtk,whk->bhtw", q_BHTK, r_WHK)
    parts["b"] = by_row.gather(-1, index)
    if biases.v_HK is not None:
        bias_by_row = torch.einsum("hk,whk->hw", biases.v_HK, r_WHK)[None, :, None].expand_as(by_row)
        parts["d"] = bias_by_row.gather(-1, index)
    if positioned is not None:
        parts.update({term: parts[term] * positioned for term in ("b", "d") if term in parts})
    return parts


def reference_scores(
    q_BHTK: Tensor,
    k_BHPK: Tensor,
    r_WHK: Tensor,
    biases: Biases,
    *,
    row: Tensor,
    positioned: Tensor | None = None,
    terms: tuple[str, ...] = ("a", "b", "c", "d"),
) -> Tensor:
    """(B, H, T, P) the sum of `terms`, before scaling; other arguments as `reference_terms`."""
    parts = reference_terms(q_BHTK, k_BHPK, r_WHK, biases, row=row, positioned=positioned)
    scores = torch.zeros_like(parts["a"])
    for term in terms:
        scores = scores + parts[term]
    return scores


class Projected(NamedTuple):
    """Projected distances and the biases of the terms that are on."""

    r_WHK: Tensor | None  # None: neither (b) nor (d)
    biases: Biases
    term_b: bool  # whether queries meet distances


class Position(nn.Module):
    """Scores of queries and keys of one layer; without positions of its own, so content alone.

    Attributes:
        extends: what happens at distances beyond those of training, in words for the user.
        needs_whole_segments: places are counted from the segment's end, so part of a segment must be padded.
    """

    extends: ClassVar[str] = "to any distance"
    needs_whole_segments: ClassVar[bool] = False

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.scale = 1.0 / math.sqrt(config.d_head)
        self.always_reference = config.attention == "reference"

    def biases(self, shared: Biases | None) -> Biases:
        """This layer's u and v, or the ones that all layers share."""
        return shared if shared is not None else Biases(None, None)

    def scores(self, q_BHTK: Tensor, read: Reading, table: DistanceTable, biases: Biases) -> Tensor:
        """(B, H, T, P) scaled scores; nothing is masked yet."""
        return q_BHTK @ read.k_BHPK.transpose(-1, -2) * self.scale

    def projected(self, table: DistanceTable, biases: Biases, *, dtype: torch.dtype) -> Projected:
        """What scores are made of besides queries and keys, for the positions of `backends.FUSED`."""
        return Projected(None, Biases(None, None), False)

    def project(self, table: DistanceTable) -> Tensor | None:
        """(W, H, K) what scores read of a table's rows; None: nothing."""
        return None

    def parts(
        self, q_BHTK: Tensor, table: DistanceTable, biases: Biases, *, place_BT: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Scores in two parts, for those who read the table of distances in their own way.

        Args:
            place_BT: (1|B, T) places of the queries, counted from the segment's first token.

        Returns:
            queries (B, H, T, K) whose products with `keys_at` are the scores before scaling, but for what stands in
            the second: (B, H, T, W), scaled, what each row of the table adds to the score of a key that it belongs
            to. None: nothing.
        """
        return q_BHTK, None

    def keys_at(self, k_BHPK: Tensor, place_BP: Tensor) -> Tensor:
        """Keys as the queries of `parts` read them, at places (1|B, P) as theirs."""
        return k_BHPK

    def at_embedding(self, x_BTD: Tensor) -> Tensor:
        """The embedded tokens with what is added to them before the first layer."""
        return x_BTD

    def at_layer(self, x_BTD: Tensor) -> Tensor:
        """The layer's input with what is added to it in every layer."""
        return x_BTD

    def _relative(
        self, content: Tensor, by_row: Tensor | None, read: Reading, table: DistanceTable, *, n_token: int
    ) -> Tensor:
        """Content scores with the position scores lined up, the quickest way that is exact."""
        if by_row is None:
            return content @ read.k_BHPK.transpose(-1, -2) * self.scale
        by_row = by_row.expand(content.shape[0], -1, n_token, -1)
        if read.contiguous and not self.always_reference:
            return shifted_scores(content, read.k_BHPK, by_row, scale=self.scale)
        return gathered_scores(content, read.k_BHPK, by_row, read=read, table=table, scale=self.scale)


class TransformerXLPosition(Position):
    """The paper's four terms, or some of them. Weights: r (H K, D); with `untie_r` also u, v (H, K)."""

    extends = "to any distance (a sinusoid); clamp_len limits it to trained ones"

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.terms = config.terms
        pair = (config.n_head, config.d_head)
        self.heads = pair
        if {"b", "d"} & set(self.terms):
            self.r = nn.Linear(config.d_model, config.n_head * config.d_head, bias=False)
        if config.untie_r:
            self.u = nn.Parameter(torch.zeros(pair)) if "c" in self.terms else None
            self.v = nn.Parameter(torch.zeros(pair)) if "d" in self.terms else None

    def biases(self, shared: Biases | None) -> Biases:
        return shared if shared is not None else Biases(self.u, self.v)

    def scores(self, q_BHTK: Tensor, read: Reading, table: DistanceTable, biases: Biases) -> Tensor:
        r, (u, v), _ = self.projected(table, biases, dtype=q_BHTK.dtype)
        if self.always_reference and r is not None:
            return self.scale * reference_scores(
                q_BHTK,
                read.k_BHPK,
                r,
                Biases(u, v),
                row=distance_rows(read, table, n_token=q_BHTK.shape[2]),
                positioned=read.positioned_keys(),
                terms=self.terms,
            )
        content = q_BHTK if u is None else q_BHTK + u[:, None]
        by_row = None if r is None else self._by_row(q_BHTK, v, r)
        return self._relative(content, by_row, read, table, n_token=q_BHTK.shape[2])

    def project(self, table: DistanceTable) -> Tensor | None:
        if table.projected_WHK is not None or not {"b", "d"} & set(self.terms):
            return table.projected_WHK
        return self.r(table.rows_WD).unflatten(-1, self.heads)

    def parts(
        self, q_BHTK: Tensor, table: DistanceTable, biases: Biases, *, place_BT: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        u, v = (None if bias is None else bias.to(q_BHTK.dtype)[:, None] for bias in biases)
        content = q_BHTK if u is None else q_BHTK + u
        r = self.project(table)
        if r is None:
            return content, None
        q = q_BHTK if v is None else q_BHTK + v
        if "b" not in self.terms:
            assert v is not None
            q = v.expand_as(q_BHTK)
        return content, rows_product(q * self.scale, r)

    def projected(self, table: DistanceTable, biases: Biases, *, dtype: torch.dtype) -> Projected:
        u, v = (bias if bias is None else bias.to(dtype) for bias in biases)
        return Projected(self.project(table), Biases(u, v), "b" in self.terms)

    def _by_row(self, q_BHTK: Tensor, v_HK: Tensor | None, r_WHK: Tensor) -> Tensor:
        """(B|1, H, T|1, W): terms (b) and (d) of every query with every row."""
        rows = r_WHK.permute(1, 2, 0)
        if "b" not in self.terms:
            assert v_HK is not None
            return (v_HK[:, None] @ rows)[None]
        return (q_BHTK if v_HK is None else q_BHTK + v_HK[:, None]) @ rows


class ShawPosition(Position):
    """A learned row and bias per distance. Weights: u (H, K), rows (N, H, K), row_bias (N, H), N = `max_distance`.

    Row N - 1 is distance 0, as in the authors' files; distances of N - 1 and more read row 0. With clamp_len c only the
    last c rows are read.
    """

    extends = "to any distance, but all beyond max_distance - 1 (or clamp_len - 1) look alike"

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.last = config.max_distance - 1
        self.limit = min(self.last, config.clamp_len - 1) if config.clamp_len > 0 else self.last
        self.u = nn.Parameter(torch.zeros(config.n_head, config.d_head))
        self.rows = nn.Parameter(torch.zeros(config.max_distance, config.n_head, config.d_head))
        self.row_bias = nn.Parameter(torch.zeros(config.max_distance, config.n_head))

    def project(self, table: DistanceTable) -> Tensor | None:
        return self.rows[self._index(table)] if table.projected_WHK is None else table.projected_WHK

    def parts(
        self, q_BHTK: Tensor, table: DistanceTable, biases: Biases, *, place_BT: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        rows, bias = self.project(table), self.row_bias[self._index(table)]
        assert rows is not None
        by_row = rows_product(q_BHTK * self.scale, rows.to(q_BHTK.dtype))
        return q_BHTK + self.u[:, None].to(q_BHTK.dtype), by_row + (bias.T[:, None] * self.scale).to(q_BHTK.dtype)

    def _index(self, table: DistanceTable) -> Tensor:
        """(W,) which learned row each row of the table is."""
        return self.last - table.distances().clamp(max=self.limit)

    def scores(self, q_BHTK: Tensor, read: Reading, table: DistanceTable, biases: Biases) -> Tensor:
        index = self._index(table)
        rows, bias = self.rows[index].to(q_BHTK.dtype), self.row_bias[index].to(q_BHTK.dtype)
        by_row = q_BHTK @ rows.permute(1, 2, 0) + bias.T[:, None]
        return self._relative(q_BHTK + self.u[:, None].to(q_BHTK.dtype), by_row, read, table, n_token=q_BHTK.shape[2])


class RotaryPosition(Position):
    """Queries and keys turned, in pairs (i, i + K/2), by their place times 10000^(-2i/K). Slots stand at -age."""

    extends = "to any distance, untrained beyond those of training"

    def parts(
        self, q_BHTK: Tensor, table: DistanceTable, biases: Biases, *, place_BT: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        return rotate(q_BHTK, place_BT), None

    def keys_at(self, k_BHPK: Tensor, place_BP: Tensor) -> Tensor:
        return rotate(k_BHPK, place_BP)

    def scores(self, q_BHTK: Tensor, read: Reading, table: DistanceTable, biases: Biases) -> Tensor:
        steps = torch.arange(q_BHTK.shape[2], device=q_BHTK.device)[None]
        slots = -read.ages()
        places = torch.cat([slots, steps.expand(slots.shape[0], -1)], dim=1)  # (1|B, P)
        turned = rotate(q_BHTK, steps) @ rotate(read.k_BHPK, places).transpose(-1, -2)
        if read.farthest is not None:
            still = q_BHTK @ rotate(read.k_BHPK[:, :, : read.n_slot], -read.farthest[None]).transpose(-1, -2)
            far = (steps[..., None] - slots[:, None] > read.farthest)[:, None]  # (1|B, 1, T, S)
            to_slots = torch.where(far, still, turned[..., : read.n_slot])
            turned = torch.cat([to_slots, turned[..., read.n_slot :]], dim=-1)
        if (positioned := read.positioned_keys()) is not None:
            turned = torch.where(positioned, turned, q_BHTK @ read.k_BHPK.transpose(-1, -2))
        return turned * self.scale


def rows_product(q_BHTK: Tensor, rows_WHK: Tensor) -> Tensor:
    """(B, H, T, W) products of queries with rows that all lanes share, which are not copied for each lane."""
    rows_HKW = rows_WHK.permute(1, 2, 0)
    if q_BHTK.shape[0] == 1:
        return q_BHTK @ rows_HKW
    batch, n_head, n_token, width = q_BHTK.shape
    q = q_BHTK.transpose(0, 1).reshape(n_head, batch * n_token, width)
    return (q @ rows_HKW).view(n_head, batch, n_token, -1).transpose(0, 1)


def rotate(x_BHTK: Tensor, place_BT: Tensor) -> Tensor:
    """(B, H, T, K) each pair (x_i, x_(i+K/2)) turned by place times frequency i; angles in at least float32."""
    wide = torch.promote_types(x_BHTK.dtype, torch.float32)
    angle = place_BT[..., None].to(wide) * frequencies(x_BHTK.shape[-1], device=x_BHTK.device).to(wide)
    cos, sin = (part.to(x_BHTK.dtype)[:, None] for part in (angle.cos(), angle.sin()))  # (1|B, 1, T, K/2)
    first, second = x_BHTK.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class AbsolutePosition(Position):
    """The sinusoid of T-1, ..., 1, 0 is added to the embeddings of a segment: the authors' attn_type 2."""

    extends = "to any segment length (a sinusoid), untrained beyond that of training"
    needs_whole_segments = True

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.clamp_len = config.clamp_len

    def at_embedding(self, x_BTD: Tensor) -> Tensor:
        place = torch.arange(x_BTD.shape[1] - 1, -1, -1, device=x_BTD.device)
        return x_BTD + sinusoid(place, d_model=x_BTD.shape[2], clamp_len=self.clamp_len, dtype=x_BTD.dtype)


class PerLayerPosition(Position):
    """Learned rows are added to each layer's input: the authors' attn_type 3. Weights: rows (N, D), N = `max_distance`.

    The newest token reads row N - 1; tokens N - 1 and more before it read row 0.
    """

    extends = "to any segment length, but tokens max_distance - 1 and more from its end look alike"
    needs_whole_segments = True

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.rows = nn.Parameter(torch.zeros(config.max_distance, config.d_model))

    def at_layer(self, x_BTD: Tensor) -> Tensor:
        last = self.rows.shape[0] - 1
        place = torch.arange(x_BTD.shape[1] - 1, -1, -1, device=x_BTD.device)
        return x_BTD + self.rows[last - place.clamp(max=last)].to(x_BTD.dtype)


KINDS: dict[str, type[Position]] = {
    "transformer_xl": TransformerXLPosition,
    "shaw": ShawPosition,
    "rotary": RotaryPosition,
    "absolute": AbsolutePosition,
    "absolute_per_layer": PerLayerPosition,
    "none": Position,
}
"""`model.position` to its class."""
