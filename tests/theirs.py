"""The three other codes, restated: the losses and memories of a state dict of theirs, pair of tokens by pair of tokens.

Written from their descriptions, with no part of ours: distances are looked up one by one, nothing is shifted, masked in
place or cached. Time first, as there. Slow and small.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


class Theirs:
    """A model of another code.

    Args:
        state: its weights by its names.
        config: its configuration.
        layout: "authors", "nvidia" or "huggingface".
        dtype: to compute in.
    """

    def __init__(self, state: dict[str, Tensor], config: dict[str, Any], layout: str, dtype: torch.dtype) -> None:
        self.hf, self.nv = layout == "huggingface", layout == "nvidia"
        self.c, self.dtype = config, dtype
        self.w = {name.removeprefix("transformer."): tensor.to(dtype) for name, tensor in state.items()}
        self.vocab = config["vocab_size" if self.hf else "n_token"]
        self.ends = [*config["cutoffs"], self.vocab]
        self.kind = config.get("attn_type", 0)

    def run(self, stream_NB: Tensor, n_segment: int) -> tuple[list[Tensor], list[list[Tensor]]]:
        """Losses (T, B) of each segment, and the memory of each layer (length, B, D) after it."""
        n_token, width, lanes = self.c["tgt_len"], self.c["d_model"], stream_NB.shape[1]
        length = self.c["mem_len"] if self.hf else 0
        memory = [torch.zeros(length, lanes, width, dtype=self.dtype) for _ in range(self.c["n_layer"])]
        losses, memories = [], []
        for s in range(n_segment):
            part = stream_NB[s * n_token : (s + 1) * n_token + 1]
            hidden, inputs = self.layers(part[:-1], memory)
            new = [torch.cat([old, x]) for old, x in zip(memory, inputs, strict=True)]
            memory = [all_[max(0, len(all_) - self.c["mem_len"]) :] for all_ in new]
            losses.append(-self.log_probs(hidden).gather(2, part[1:, :, None])[..., 0])
            memories.append(memory)
        return losses, memories

    def layers(self, tokens_TB: Tensor, memory: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """The last layer's output and every layer's input."""
        x, inputs = self.embed(tokens_TB), []
        if self.kind == 2:
            x = x + self.sinusoid(torch.arange(len(x) - 1, -1, -1))[:, None]
        for n, old in enumerate(memory):
            if self.kind == 3:
                x = x + self.w["r_emb"][n][-len(x) :].reshape(len(x), 1, -1)
            inputs.append(x)
            x = self.layer(n, x, old)
        return x, inputs

    def embed(self, tokens_TB: Tensor) -> Tensor:
        out = torch.zeros(*tokens_TB.shape, self.c["d_model"], dtype=self.dtype)
        for t, b in torch.cartesian_prod(*map(torch.arange, tokens_TB.shape)).tolist():
            token, i = int(tokens_TB[t, b]), 0
            if self.c["div_val"] > 1:
                i = next(i for i, end in enumerate(self.ends) if token < end)
                token -= [0, *self.ends][i]
            row = self.w[f"word_emb.emb_layers.{i}.weight"][token]
            projection = self.w.get(f"word_emb.emb_projs.{i}")
            out[t, b] = row if projection is None else projection @ row
        return out * math.sqrt(self.c["d_model"])

    def sinusoid(self, distance: Tensor) -> Tensor:
        width = self.c["d_model"]
        frequency = (1 / 10000 ** (torch.arange(0, width, 2).float() / width)).to(self.dtype)
        clamp = self.c["clamp_len"]
        angle = (distance.clamp(max=clamp) if clamp > 0 else distance)[..., None].to(self.dtype) * frequency
        return torch.cat([angle.sin(), angle.cos()], dim=-1)

    def layer(self, n: int, x: Tensor, old: Tensor) -> Tensor:
        pre = self.c["pre_lnorm"]
        heads = self.attend(n, x, torch.cat([old, x]))
        y = x + heads @ self.w[f"layers.{n}.dec_attn.o_net.weight"].T
        if not pre:
            y = self.norm(y, f"layers.{n}.dec_attn.layer_norm")
        inner = self.norm(y, f"layers.{n}.pos_ff.layer_norm") if pre else y
        inner = self.linear(self.linear(inner, f"layers.{n}.pos_ff.CoreNet.0").relu(), f"layers.{n}.pos_ff.CoreNet.3")
        return y + inner if pre else self.norm(y + inner, f"layers.{n}.pos_ff.layer_norm")

    def attend(self, n: int, x: Tensor, seen: Tensor) -> Tensor:
        """(T, B, H K)."""
        pair, name = (self.c["n_head"], self.c["d_head"]), f"layers.{n}.dec_attn."
        normed = self.norm(seen, f"{name}layer_norm") if self.c["pre_lnorm"] else seen
        if self.kind < 2:
            q, k, v = (normed @ self.w[f"{name}qkv_net.weight"].T).chunk(3, dim=-1)
            q = q[-len(x) :]
        else:
            q = x @ self.w[f"{name}q_net.weight"].T  # never normalised
            k, v = (normed @ self.w[f"{name}kv_net.weight"].T).chunk(2, dim=-1)
        q, k, v = (part.unflatten(-1, pair) for part in (q, k, v))
        distance = (torch.arange(len(x)) + len(seen) - len(x))[:, None] - torch.arange(len(seen))  # (T, P)
        scores = self.scores(n, q, k, distance) / math.sqrt(pair[1])
        hidden = distance < 0
        if self.c["same_length"]:
            hidden = hidden | (distance >= self.c["mem_len"] + self.nv)
        weights = scores.masked_fill(hidden[:, :, None, None], float("-inf")).softmax(dim=1)
        return torch.einsum("ijbh,jbhk->ibhk", weights, v).flatten(2)

    def scores(self, n: int, q: Tensor, k: Tensor, distance: Tensor) -> Tensor:
        """(T, P, B, H)."""
        at = distance.clamp(min=0)
        if self.kind == 0:
            own = f"layers.{n}.dec_attn." if self.c.get("untie_r") else ""
            u, v = self.w[f"{own}r_w_bias"], self.w[f"{own}r_r_bias"]
            r = self.sinusoid(at) @ self.w[f"layers.{n}.dec_attn.r_net.weight"].T
            r = r.unflatten(-1, u.shape)
            return torch.einsum("ibhk,jbhk->ijbh", q + u, k) + torch.einsum("ibhk,ijhk->ijbh", q + v, r)
        if self.kind == 1:
            rows, bias = self.w["r_emb"][n], self.w["r_bias"][n]
            if self.c["clamp_len"] > 0:
                rows, bias = rows[-self.c["clamp_len"] :], bias[-self.c["clamp_len"] :]
            index = (len(rows) - 1 - at).clamp(min=0)
            content = torch.einsum("ibhk,jbhk->ijbh", q + self.w["r_w_bias"][n], k)
            return content + torch.einsum("ibhk,ijhk->ijbh", q, rows[index]) + bias[index][:, :, None]
        return torch.einsum("ibhk,jbhk->ijbh", q, k)

    def log_probs(self, hidden: Tensor) -> Tensor:
        """(T, B, V)."""
        if len(self.ends) == 1:
            return self.logits(0, hidden, 0, self.vocab).log_softmax(-1)
        short, n = self.ends[0], len(self.ends) - 1
        clusters = self.project(0, hidden) @ self.w["crit.cluster_weight"].T + self.w["crit.cluster_bias"]
        head = torch.cat([self.logits(0, hidden, 0, short), clusters], dim=-1).log_softmax(-1)
        parts = [head[..., :short]]
        for i in range(1, n + 1):
            row = i - 1 if self.hf else n - i
            tail = self.logits(i, hidden, self.ends[i - 1], self.ends[i]).log_softmax(-1)
            parts.append(tail + head[..., short + row, None])
        return torch.cat(parts, dim=-1)

    def logits(self, i: int, hidden: Tensor, start: int, end: int) -> Tensor:
        """Of the symbols of cluster i."""
        table = 0 if self.c["div_val"] == 1 else i
        if table or self.c["div_val"] > 1:
            start, end = 0, end - start
        tied = self.c.get("tie_word_embeddings" if self.hf else "tie_weight", True)
        out = f"crit.out_layers_weights.{table}" if self.nv else f"crit.out_layers.{table}.weight"
        weight = self.w[f"word_emb.emb_layers.{table}.weight" if tied else out]
        bias = self.w[f"crit.out_layers_biases.{table}" if self.nv else f"crit.out_layers.{table}.bias"]
        return self.project(i, hidden) @ weight[start:end].T + bias[start:end]

    def project(self, i: int, hidden: Tensor) -> Tensor:
        wide = (self.c["d_embed"] or self.c["d_model"]) == self.c["d_model"]
        if self.c["div_val"] == 1 and wide:
            return hidden
        first = 0 if self.c["div_val"] == 1 else i
        tied = i < len(self.c["tie_projs"]) and self.c["tie_projs"][i]
        return hidden @ self.w[f"word_emb.emb_projs.{first}" if tied else f"crit.out_projs.{i}"]

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.w[f"{name}.weight"], self.w[f"{name}.bias"])

    def norm(self, x: Tensor, name: str) -> Tensor:
        eps = self.c.get("layer_norm_epsilon", 1e-5)
        return F.layer_norm(x, x.shape[-1:], self.w[f"{name}.weight"], self.w[f"{name}.bias"], eps)


def random_state(config: dict[str, Any], layout: str, *, seed: int = 0) -> dict[str, Tensor]:
    """Weights of a model of theirs by name, tied ones under all of their names."""
    hf, nv = layout == "huggingface", layout == "nvidia"
    c, make = config, torch.Generator().manual_seed(seed)
    width, inner, vocab = c["d_model"], c["n_head"] * c["d_head"], c["vocab_size" if hf else "n_token"]
    pre, embed, kind = "transformer." if hf else "", c["d_embed"] or width, c.get("attn_type", 0)
    state: dict[str, Tensor] = {}

    def add(name: str, *shape: int, mean: float = 0.0, std: float = 0.2) -> None:
        state[name] = mean + std * torch.randn(shape, generator=make)

    ends = [0, *c["cutoffs"], vocab]
    sizes = [vocab] if c["div_val"] == 1 else [b - a for a, b in itertools.pairwise(ends)]
    projected = c["div_val"] > 1 or embed != width
    for i, size in enumerate(sizes):
        add(f"{pre}word_emb.emb_layers.{i}.weight", size, embed // c["div_val"] ** i)
        out = f"crit.out_layers_weights.{i}" if nv else f"crit.out_layers.{i}.weight"
        if not c.get("tie_word_embeddings" if hf else "tie_weight", True):
            add(out, size, embed // c["div_val"] ** i)
        elif not nv:
            state[out] = state[f"{pre}word_emb.emb_layers.{i}.weight"]
        add(f"crit.out_layers_biases.{i}" if nv else f"crit.out_layers.{i}.bias", size, std=0.1)
        if projected:
            add(f"{pre}word_emb.emb_projs.{i}", width, embed // c["div_val"] ** i)
            if nv:
                state[f"crit.shared_out_projs.{i}"] = state[f"word_emb.emb_projs.{i}"]
    for i in range(len(ends) - 1 if projected else 0):
        if not (i < len(c["tie_projs"]) and c["tie_projs"][i]):
            add(f"crit.out_projs.{i}", width, embed // c["div_val"] ** i)
        elif not nv:
            state[f"crit.out_projs.{i}"] = state[f"{pre}word_emb.emb_projs.{0 if c['div_val'] == 1 else i}"]
    if c["cutoffs"]:
        add("crit.cluster_weight", len(c["cutoffs"]), embed, std=0.3)
        add("crit.cluster_bias", len(c["cutoffs"]), std=0.1)
    for n in range(c["n_layer"]):
        layer = f"{pre}layers.{n}."
        shapes = (
            {"qkv_net": (3 * inner, width)} if kind < 2 else {"q_net": (inner, width), "kv_net": (2 * inner, width)}
        )
        shapes |= {"o_net": (width, inner), **({"r_net": (inner, width)} if kind == 0 else {})}
        for name, shape in shapes.items():
            add(f"{layer}dec_attn.{name}.weight", *shape)
        for name in ("dec_attn", "pos_ff"):
            add(f"{layer}{name}.layer_norm.weight", width, mean=1.0, std=0.1)
            add(f"{layer}{name}.layer_norm.bias", width, std=0.1)
        for name, shape in {"0": (c["d_inner"], width), "3": (width, c["d_inner"])}.items():
            add(f"{layer}pos_ff.CoreNet.{name}.weight", *shape)
            add(f"{layer}pos_ff.CoreNet.{name}.bias", shape[0], std=0.1)
    pair, rows = (c["n_head"], c["d_head"]), c["tgt_len"] + c["mem_len"]
    for name in ("r_w_bias", "r_r_bias") if kind == 0 else ():
        if not c.get("untie_r"):
            add(f"{pre}{name}", *pair)
        for n in range(c["n_layer"]) if hf else ():
            if c["untie_r"]:
                add(f"{pre}layers.{n}.dec_attn.{name}", *pair)
            else:
                state[f"{pre}layers.{n}.dec_attn.{name}"] = state[f"{pre}{name}"]
    if kind == 1:
        add("r_emb", c["n_layer"], rows, *pair)
        add("r_w_bias", c["n_layer"], *pair)
        add("r_bias", c["n_layer"], rows, c["n_head"])
    if kind == 3:
        add("r_emb", c["n_layer"], rows, *((width,) if nv else pair))
    if kind in (0, 2):
        state[f"{pre}pos_emb.inv_freq"] = 1 / 10000 ** (torch.arange(0, width, 2).float() / width)
    return state
