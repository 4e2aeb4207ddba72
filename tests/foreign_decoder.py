"""A decoder that shares nothing with our model: pre-norm, distances as in ALiBi, memory by the interface alone."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from txl_lightning.memory.base import MemoryStrategy, Segment, State, Tap, fresh_state, keep_dead, reset_lanes


class Layer(nn.Module):
    def __init__(self, memory: MemoryStrategy, *, d_model: int, n_head: int) -> None:
        super().__init__()
        self.memory, self.n_head = memory, n_head
        self.norm, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.q, self.k, self.v, self.out = (nn.Linear(d_model, d_model, bias=False) for _ in range(4))
        self.ffn = nn.Sequential(nn.Linear(d_model, 2 * d_model), nn.ReLU(), nn.Linear(2 * d_model, d_model))
        self.register_buffer("slope", 2.0 ** -torch.arange(1, n_head + 1))

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.n_head, -1)).transpose(1, 2)  # (B, H, T, K)

    def project_slots(self, hidden_BSD: Tensor) -> tuple[Tensor, Tensor]:
        h = self.norm(hidden_BSD)
        return self.heads(self.k(h)), self.heads(self.v(h))

    def forward(self, x: Tensor, state: State, segment: Segment) -> tuple[Tensor, State]:
        state, old = reset_lanes(self.memory, state, segment.reset), state
        h, step = self.norm(x), torch.arange(x.shape[1])
        q, k, v = self.heads(self.q(h)), self.heads(self.k(h)), self.heads(self.v(h))
        tap = Tap(x_BTD=x, h_BTD=h, q_BHTK=q, k_BHTK=k, v_BHTK=v)
        distance = (step[:, None] - step)[None, None]
        bias = (-self.slope[:, None, None] * distance).masked_fill(distance < 0, float("-inf"))
        slots = self.memory.slots(state, x, segment)
        if slots is not None:
            known = slots.keys_values if slots.hidden is None else self.project_slots(slots.hidden)
            far = slots.age[:, None, None] + step[:, None]
            their = (slots.bias - self.slope[:, None, None] * far).expand(len(x), self.n_head, *far.shape[2:])
            bias = torch.cat([their, bias.expand(len(x), -1, -1, -1)], dim=-1)
            tap = tap._replace(slot_k_BHSK=known[0], slot_v_BHSK=known[1])
            k, v = torch.cat([known[0], k], dim=2), torch.cat([known[1], v], dim=2)
        weights = (q @ k.mT / q.shape[-1] ** 0.5 + bias).softmax(dim=-1)
        heads, extra = self.memory.side(state, tap, weights @ v, segment)
        y = x + self.out(heads.transpose(1, 2).flatten(2)) + (0 if extra is None else extra)
        y = y + self.ffn(self.norm2(y))
        new, _ = self.memory.write(state, tap._replace(y_BTD=y), self, segment)
        return y, keep_dead(new, old, segment.length)


class Decoder(nn.Module):
    def __init__(self, memories: list[MemoryStrategy], *, vocab: int, d_model: int, n_head: int) -> None:
        super().__init__()
        self.embedding, self.logits = nn.Embedding(vocab, d_model), nn.Linear(d_model, vocab)
        self.layers = nn.ModuleList(Layer(memory, d_model=d_model, n_head=n_head) for memory in memories)

    def init_state(self, batch: int, *, form: str = "hidden") -> list[State]:
        like = self.logits.weight
        place = {"form": form, "device": like.device, "dtype": like.dtype}
        return [fresh_state(layer.memory, batch, **place) for layer in self.layers]

    def forward(self, tokens_BT: Tensor, states: list[State], segment: Segment) -> tuple[Tensor, list[State]]:
        x, new = self.embedding(tokens_BT), []
        for layer, state in zip(self.layers, states, strict=True):
            x, state = layer(x, state, segment)
            new.append(state)
        return self.logits(x), new
