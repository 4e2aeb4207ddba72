"""The tape: a segment, what each layer's memory holds of the tokens before it, and how far back it reaches.

An SVG drawn from the memory's own formulas (`MemoryConfig.layer_spans`, `reach`), nothing measured.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from txl_lightning.config import Config
from txl_lightning.memory_config import reach_of

WIDTH, LEFT, RIGHT = 940, 70, 20  # pixels
MEMORY, SEGMENT, REACH, INK = "#7aa6c2", "#f2b66d", "#c0392b", "#333"


def tape(config: Config) -> str:
    """One SVG element."""
    segment_len = config.data.segment_len
    spans = config.memory.layer_spans(config.model, segment_len=segment_len)
    if config.memory.reset == "segment":
        spans = [0.0] * config.model.n_layer
    elif config.model.architecture == "lstm":
        return "<p>The LSTM's state is carried from segment to segment: any earlier token can matter.</p>"
    if spans is None:
        return "<p>This memory has no formula for what it reaches; <code>txl analyze reach</code> measures it.</p>"
    return _Tape(spans, segment_len).draw()


class _Tape:
    """Places tokens on the picture: 0 is the segment's first token, what came before is negative."""

    def __init__(self, spans: Sequence[float], segment_len: int) -> None:
        self.spans, self.segment_len = spans, segment_len
        self.reaches = [reach_of(spans[: index + 1], segment_len=segment_len) for index in range(len(spans))]
        known = [value for value in (*spans, *self.reaches) if value != math.inf]
        endless = any(value == math.inf for value in self.reaches)
        self.left = max([*known, 2 * segment_len]) * 1.04 + (3 * segment_len if endless else 0)
        self.row = max(8, min(26, 300 // len(spans)))

    def x(self, token: float) -> float:
        """Pixels."""
        token = max(token, -self.left)
        return LEFT + (token + self.left) / (self.left + self.segment_len) * (WIDTH - LEFT - RIGHT)

    def draw(self) -> str:
        top, height = 34, 34 + self.row * len(self.spans) + 62
        rows = [self._layer(index, top) for index in range(len(self.spans))]
        bottom = top + self.row * len(self.spans)
        parts = [*self._borders(top, bottom), *rows, *self._axis(bottom), self._legend()]
        label = html.escape(self._in_words())
        return (
            f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{label}" font-family="sans-serif" '
            f'font-size="12" fill="{INK}">{"".join(parts)}</svg><p>{label}</p>'
        )

    def _layer(self, index: int, top: int) -> str:
        """The highest layer is on top."""
        y = top + self.row * (len(self.spans) - 1 - index)
        span, reach, inner = self.spans[index], self.reaches[index], self.row - 4
        parts = [_box(self.x(0), y, self.x(self.segment_len) - self.x(0), inner, SEGMENT)]
        if span:
            start = self.x(-span)
            parts.append(_box(start, y, self.x(0) - start, inner, MEMORY))
        if reach:
            parts.append(_line(self.x(-reach), self.x(0), y + inner / 2, arrow=reach == math.inf))
        if len(self.spans) <= 12 or index in (0, len(self.spans) - 1):
            parts.append(f'<text x="{LEFT - 8}" y="{y + inner / 2 + 4}" text-anchor="end">layer {index}</text>')
        return "".join(parts)

    def _borders(self, top: int, bottom: int) -> list[str]:
        count = min(int(self.left // self.segment_len), 60)
        places = [self.x(-number * self.segment_len) for number in range(-1, count + 1)]
        return [f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top - 6}" y2="{bottom}" stroke="#ddd"/>' for x in places]

    def _axis(self, bottom: int) -> list[str]:
        total = self.reaches[-1]
        marks = {0.0: "0", float(self.segment_len): f"+{self.segment_len}"}
        if 0 < total < math.inf:
            marks[-total] = f"-{total:g}"
        texts = [
            f'<text x="{self.x(token):.1f}" y="{bottom + 18}" text-anchor="middle">{text}</text>'
            for token, text in marks.items()
        ]
        middle, words = (
            LEFT + (WIDTH - LEFT) / 2,
            "tokens; 0 is the first of a segment, grey lines are segment borders",
        )
        return [*texts, f'<text x="{middle}" y="{bottom + 40}" text-anchor="middle">{words}</text>']

    def _legend(self) -> str:
        parts, x = [], LEFT
        drawn = {SEGMENT: True, MEMORY: any(self.spans), REACH: any(self.reaches)}
        words = {SEGMENT: "the segment", MEMORY: "in the layer's memory", REACH: "what can matter"}
        for color, text in ((color, words[color]) for color in words if drawn[color]):
            height, y = (3, 13) if color == REACH else (12, 8)
            parts.append(f'{_box(x, y, 18, height, color)}<text x="{x + 24}" y="18">{text}</text>')
            x += 190
        return "".join(parts)

    def _in_words(self) -> str:
        total = self.reaches[-1]
        if total == math.inf:
            return "By its design this memory has no bound: any earlier token can matter."
        if not total:
            return "Every segment stands alone: no earlier token can matter."
        segments = f"{total / self.segment_len:.1f}".removesuffix(".0")
        return (
            f"A segment's first token can depend on the {total:g} tokens before it: "
            f"{segments} segment{'' if segments == '1' else 's'} of {self.segment_len}."
        )


def _box(x: float, y: float, width: float, height: float, color: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="2" fill="{color}"/>'


def _line(start: float, end: float, y: float, *, arrow: bool) -> str:
    head = f'<path d="M{start:.1f} {y:.1f} l8 -4 v8 z" fill="{REACH}"/>' if arrow else ""
    return (
        f'<line x1="{start:.1f}" x2="{end:.1f}" y1="{y:.1f}" y2="{y:.1f}" stroke="{REACH}" stroke-width="1.6"/>{head}'
    )
