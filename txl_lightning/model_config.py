"""The keys of the `model` group, what they rule out, and how many parameters they make."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from txl_lightning.section import Section, key

POSITIONS = {
    "transformer_xl": True,
    "shaw": True,
    "rotary": True,
    "none": True,
    "absolute": False,
    "absolute_per_layer": False,
}
"""What `model.position` may be, and whether it can tell where a memory's tokens stand."""


OF_TRANSFORMER = (
    "n_head n_kv_head d_head d_inner dropatt pre_norm norm_queries final_norm norm norm_eps qk_norm ffn position terms "
    "max_distance untie_r clamp_len same_length attention checkpointing"
).split()
"""Keys of `model` that an LSTM has no use for."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Section):
    """The Transformer-XL itself."""

    section: ClassVar[str] = "model"

    architecture: str = key(
        "transformer",
        "transformer: the Transformer-XL; lstm: a stacked LSTM as a baseline, whose state is its memory",
        choices=("transformer", "lstm"),
    )
    n_layer: int = key(4, "number of layers", minimum=1)
    d_model: int = key(128, "width of the residual stream (even: half sines, half cosines)", minimum=2)
    n_head: int = key(4, "attention heads", minimum=1)
    n_kv_head: int | None = key(None, "heads of keys and values, each shared by a group; null: n_head", minimum=1)
    d_head: int = key(32, "width of one head", minimum=1)
    d_inner: int = key(512, "width inside the feed-forward part", minimum=1)
    vocab_size: int = key(257, "symbols; checked against the data (257: bytes and a separator)", minimum=2)
    dropout: float = key(
        0.0, "dropout on embeddings, positions, sub-layer outputs and the output", minimum=0, maximum=0.99
    )
    dropatt: float = key(0.0, "dropout on attention weights", minimum=0, maximum=0.99)
    dropemb: float = key(0.0, "share of the vocabulary whose embeddings a segment sees as 0", minimum=0, maximum=0.99)
    variational_dropout: bool = key(False, "one dropout mask for all tokens of a lane's segment")
    pre_norm: bool = key(
        False, "normalise each sub-layer's input (true) or its sum with the residual (false: the paper)"
    )
    norm_queries: bool = key(True, "under pre_norm normalise what queries are made from too, not just keys and values")
    final_norm: bool = key(False, "normalise the last layer's output; for pre_norm")
    norm: str = key("layernorm", "kind of every norm", choices=("layernorm", "rmsnorm"))
    norm_eps: float = key(1e-5, "added to the variance in every norm", above=0)
    qk_norm: bool = key(False, "RMS-normalise each head's queries and keys")
    ffn: str = key("relu", "feed-forward part: its activation, or gated", choices=("relu", "gelu", "swiglu"))
    bias: bool = key(True, "biases in norms, feed-forward parts and the softmax")
    position: str = key("transformer_xl", "how a layer tells where a key stands", choices=tuple(POSITIONS))
    terms: tuple[str, ...] = key(
        ("a", "b", "c", "d"),
        "terms of the transformer_xl score: a content, b position, c and d their biases u and v",
        choices=("a", "b", "c", "d"),
    )
    max_distance: int = key(512, "learned rows of shaw and absolute_per_layer; what is further reads one", minimum=1)
    untie_r: bool = key(False, "give every layer its own biases u and v instead of one shared pair")
    clamp_len: int = key(-1, "distances beyond this many tokens count as this many; -1: off", minimum=-1)
    same_length: bool = key(False, "let every token see equally far back: as far as memory.mem_len reaches")
    same_length_rule: str = key(
        "mem_len",
        "keys a token sees under same_length, itself included: mem_len as the authors' PyTorch code and Hugging Face, "
        "mem_len+1 as the authors' TensorFlow code and NVIDIA",
        choices=("mem_len", "mem_len+1"),
    )
    cutoffs: tuple[int, ...] = key((), "ids at which the adaptive softmax begins a new cluster; []: a plain softmax")
    div_val: int = key(1, "each cluster's embedding is this many times narrower than the one before", minimum=1)
    d_embed: int | None = key(None, "width of the first cluster's embedding; null: d_model", minimum=1)
    tie_weights: bool = key(True, "the softmax uses the embedding's weights")
    tie_projs: tuple[bool, ...] = key(
        (), "for each cluster true or false: whether its softmax uses the embedding's projection; []: none"
    )
    proj_same_dim: bool = key(True, "project clusters too that are as wide as the model (with div_val > 1)")
    cluster_order: str = key(
        "ascending",
        "rows of cluster_weight: ascending as in TensorFlow and Hugging Face, reversed as in the authors' PyTorch",
        choices=("ascending", "reversed"),
    )
    init_std: float = key(0.02, "standard deviation of initial weights", above=0)
    proj_init_std: float = key(0.01, "the same for the projections of embedding and softmax", above=0)
    attention: str = key(
        "auto",
        "how attention is computed, all exact: auto picks by device; reference writes the terms out; shift lines "
        "distances up in matrix products; compiled is that through torch.compile; triton stores no T x S scores (CUDA)",
        choices=("auto", "reference", "shift", "compiled", "triton"),
    )
    checkpointing: bool = key(False, "recompute each layer in backward instead of keeping its activations")

    def check(self) -> None:
        if self.d_model % 2:
            raise self.refuse(
                "d_model", "must be even: half of it holds sines, half cosines", "take the next even number"
            )
        if self.clamp_len == 0:
            raise self.refuse("clamp_len", "must be -1 or >= 1", "-1 turns clamping off")
        if self.n_kv_head is not None and self.n_head % self.n_kv_head:
            raise self.refuse("n_kv_head", f"must divide model.n_head={self.n_head}", "each serves a group of heads")
        self._check_positions()
        self._check_clusters()

    def _check_positions(self) -> None:
        if len(set(self.terms)) != len(self.terms) or "a" not in self.terms:
            raise self.refuse("terms", "must hold a, and each term once", "for example model.terms=[a,b]")
        if self.position != "transformer_xl" and len(self.terms) < 4:
            cure = "leave it out, or set model.position=transformer_xl"
            raise self.refuse("terms", f"model.position={self.position} has other terms", cure)
        if self.position == "rotary" and self.d_head % 2:
            raise self.refuse("d_head", "must be even for rotary positions", "take the next even number")
        if self.position == "absolute_per_layer" and self.clamp_len > 0:
            raise self.refuse("clamp_len", f"model.position={self.position} has no distances to clamp", "set it to -1")
        if self.position in ("rotary", "none") and self.clamp_len > 0:
            raise self.refuse("clamp_len", f"model.position={self.position} cannot clamp distances", "set it to -1")
        if self.attention == "triton" and self.position in ("shaw", "rotary"):
            raise self.refuse("attention", f"there is no kernel for model.position={self.position}", "set it to auto")
        if self.untie_r and self.position != "transformer_xl":
            raise self.refuse("untie_r", f"model.position={self.position} shares no biases", "set it to false")
        if not self.norm_queries and not self.pre_norm:
            raise self.refuse("norm_queries", "model.pre_norm is false, so nothing is normalised", "leave it true")

    def _check_clusters(self) -> None:
        if not all(type(cut) is int for cut in self.cutoffs):
            raise self.refuse("cutoffs", "must be whole numbers", "for example model.cutoffs=[20000,40000,200000]")
        if list(self.cutoffs) != sorted(set(self.cutoffs)) or any(cut < 1 for cut in self.cutoffs):
            raise self.refuse("cutoffs", "must rise, from 1 or more", "for example model.cutoffs=[20000,40000,200000]")
        if self.cutoffs and self.cutoffs[-1] >= self.vocab_size:
            rule = f"the last cluster would be empty: model.vocab_size={self.vocab_size}"
            raise self.refuse("cutoffs", rule, f"keep cutoffs below {self.vocab_size}")
        if self.tie_projs and len(self.tie_projs) != self.n_cluster:
            rule = f"there are {self.n_cluster} clusters (one more than model.cutoffs)"
            raise self.refuse("tie_projs", rule, "give true or false for each")
        if self.cluster_widths[-1] < 1:
            rule = f"divides the width {self.embed_width} down to nothing in {self.n_cluster} clusters"
            raise self.refuse("div_val", rule, "lower it or use fewer cutoffs")

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.n_kv_head or self.n_head

    @property
    def n_cluster(self) -> int:
        """Clusters of the vocabulary."""
        return len(self.cutoffs) + 1

    @property
    def cluster_sizes(self) -> tuple[int, ...]:
        """Symbols of each cluster."""
        ends = (0, *self.cutoffs, self.vocab_size)
        return tuple(end - start for start, end in pairwise(ends))

    @property
    def embed_width(self) -> int:
        """Width of the first cluster's embedding."""
        return self.d_embed or self.d_model

    @property
    def cluster_widths(self) -> tuple[int, ...]:
        """Width of each cluster's embedding."""
        return tuple(self.embed_width // self.div_val**i for i in range(self.n_cluster))

    def projects(self, cluster: int) -> bool:
        """Whether a cluster has a projection between its embedding and the model's width."""
        if self.div_val == 1:
            return self.embed_width != self.d_model
        return self.proj_same_dim or self.cluster_widths[cluster] != self.d_model

    def ties_projection(self, cluster: int) -> bool:
        """Whether the softmax of a cluster uses the embedding's projection."""
        return bool(self.tie_projs) and self.tie_projs[cluster] and self.projects(cluster)

    def num_params(self) -> int:
        """Parameters of the model without those of its memory, counted without building it."""
        if self.architecture == "lstm":
            bias = 4 * self.d_model if self.bias else 0
            return self._table_params() + self.n_layer * (8 * self.d_model**2 + bias)
        layer = self._attention_params() + self._feed_forward_params() + 2 * self._norm_params()
        return (
            self._table_params()
            + self.n_layer * layer
            + (self._norm_params() if self.final_norm else 0)
            + (0 if self.untie_r or self.position != "transformer_xl" else self._pair_params())
        )

    def _norm_params(self) -> int:
        return self.d_model * (2 if self.norm == "layernorm" and self.bias else 1)

    def _pair_params(self) -> int:
        """Of the biases u and v, those whose terms are on."""
        return self.n_head * self.d_head * len({"c", "d"} & set(self.terms))

    def _attention_params(self) -> int:
        inner = self.n_head * self.d_head
        qkv_and_out = self.d_model * (2 * inner + 2 * self.kv_heads * self.d_head)
        return qkv_and_out + (2 * self.d_head if self.qk_norm else 0) + self._position_params(inner)

    def _position_params(self, inner: int) -> int:
        """Of one layer's positions."""
        if self.position == "transformer_xl":
            distances = self.d_model * inner if {"b", "d"} & set(self.terms) else 0
            return distances + (self._pair_params() if self.untie_r else 0)
        if self.position == "shaw":
            return inner + self.max_distance * (inner + self.n_head)
        return self.max_distance * self.d_model if self.position == "absolute_per_layer" else 0

    def _feed_forward_params(self) -> int:
        if self.ffn == "swiglu":
            return 3 * self.d_model * self.d_inner + (2 * self.d_inner + self.d_model if self.bias else 0)
        return 2 * self.d_model * self.d_inner + (self.d_inner + self.d_model if self.bias else 0)

    def _table_params(self) -> int:
        """Of embedding and softmax."""
        clusters = list(zip(self.cluster_sizes, self.cluster_widths, strict=True))
        tables = sum(size * width for size, width in clusters) * (1 if self.tie_weights else 2)
        bridges = sum(
            self.d_model * width * ((i == 0 or self.div_val > 1) + (not self.ties_projection(i)))
            for i, (_, width) in enumerate(clusters)
            if self.projects(i)
        )
        biases = self.vocab_size + len(self.cutoffs) if self.bias else 0
        return tables + bridges + len(self.cutoffs) * self.embed_width + biases
