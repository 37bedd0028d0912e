"""Charts as SVG text: lines, points and stacked bars, small enough to stand inside a page or alone in a file.

Drawn for a card 380 units wide, so that the 12-unit text is still read when the card is as wide as a phone. Colours
are Okabe and Ito's eight that colour-blind readers tell apart, and every series also has a dash of its own. Text takes
the colour of the page around it; alone, the file follows the reader's light or dark setting. No scripts, no fonts, no
network.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 380, 264
LEFT, RIGHT, BOTTOM, TITLE_HEIGHT, LEGEND_ROW = 58, 14, 44, 26, 16
CHARACTER = 7.2  # width of one at 12 units: on the wide side, since fonts differ
MAX_POINTS = 400  # a line is thinned to this many: no screen shows more
# Okabe and Ito, "Color Universal Design", without the black that a dark page swallows.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a6fdf", "#999999")
DASHES = ("", "6 3", "2 3", "8 3 2 3", "12 4", "4 2", "1 4", "10 2 2 2")
STYLE = (
    ".chart{font:12px system-ui,sans-serif;color:#1d2530}.chart text{fill:currentColor}"
    ".chart .grid{stroke:currentColor;stroke-opacity:.14}.chart .axis{stroke:currentColor;stroke-opacity:.55}"
    ".chart .heading{font-weight:600;font-size:13px}.chart .line{fill:none;stroke-width:1.8}"
)
ALONE = "@media(prefers-color-scheme:dark){.chart{color:#e6e9ee;background:#14181f}}"


@dataclass(frozen=True)
class Series:
    """Points of one name. `y` may hold None: the line breaks there. `marks` draws the points, `line` joins them.

    `colour` and `dash` are numbers on the palettes; by default a series' place among the others is both.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    line: bool = True
    marks: bool = False
    colour: int | None = None
    dash: int | None = None


@dataclass(frozen=True)
class Dots:
    """One row a label: its values as dots on a line, and their mean as a tick."""

    label: str
    values: Sequence[float]
    names: Sequence[str]
    colour: int = 0


@dataclass(frozen=True)
class Bars:
    """One stacked bar a label, its pieces in the order of `parts`: part -> a value a label."""

    labels: Sequence[str]
    parts: Mapping[str, Sequence[float]]
    notes: Sequence[str] = field(default=())


def line_chart(
    title: str,
    x_label: str,
    y_label: str,
    series: Sequence[Series],
    *,
    log_x: bool = False,
    log_y: bool = False,
    from_zero: bool = False,
    alone: bool = False,
) -> str:
    """Both labels name their unit. Points that are None, not finite, or not positive on a log axis are left out."""
    shown = [_clean(s, log_x, log_y) for s in series]
    shown = [s for s in shown if any(y is not None for y in s.y)]
    keys = [
        _Key(s.name, COLOURS[_or(s.colour, i) % len(COLOURS)], DASHES[_or(s.dash, i) % len(DASHES)])
        for i, s in enumerate(shown)
    ]
    frame = _Frame(title, keys if len(keys) > 1 else [], alone)
    xs = [x for s in shown for x, y in zip(s.x, s.y, strict=True) if y is not None]
    ys = [y for s in shown for y in s.y if y is not None]
    if not xs:
        return frame.close(x_label, y_label, f"{title}: no data", empty=True)
    x_axis = _Axis(min(xs), max(xs), log_x, LEFT, WIDTH - RIGHT)
    y_axis = _Axis(
        0.0 if from_zero else min(ys), max(ys), log_y, frame.bottom, frame.top, pad=0.0 if from_zero else 0.05
    )
    frame.grid(x_axis, y_axis)
    for s, (_, colour, dash) in zip(shown, keys, strict=True):
        if s.line:
            frame.add(
                f'<path class="line" stroke="{colour}"'
                + (f' stroke-dasharray="{dash}"' if dash else "")
                + f' d="{_path(s, x_axis, y_axis)}"><title>{escape(s.name)}</title></path>'
            )
        if s.marks:
            for x, y in zip(s.x, s.y, strict=True):
                if y is not None:
                    frame.add(
                        f'<circle cx="{x_axis.at(x):.1f}" cy="{y_axis.at(y):.1f}" r="3.5" fill="{colour}">'
                        f"<title>{escape(s.name)}: {_number(x)}, {_number(y)}</title></circle>"
                    )
    spoken = f"{title}. {y_label} over {x_label}; " + ", ".join(
        f"{s.name} from {_number(_ends(s)[0])} to {_number(_ends(s)[1])}" for s in shown
    )
    return frame.close(x_label, y_label, spoken)


def bar_chart(title: str, x_label: str, bars: Bars, *, alone: bool = False) -> str:
    """Horizontal stacked bars, one a label, pieces from the left. `x_label` names the unit."""
    names = list(bars.parts)
    longest = max((len(label) for label in bars.labels), default=0)
    left = min(172.0, max(LEFT, 16 + CHARACTER * min(longest, 22)))
    row = 26
    keys = [_Key(name, COLOURS[i % len(COLOURS)], "") for i, name in enumerate(names)]
    frame = _Frame(title, keys if len(names) > 1 else [], alone, rows=row * len(bars.labels))
    totals = [sum(max(0.0, float(v[i])) for v in bars.parts.values()) for i in range(len(bars.labels))]
    if not totals or max(totals) <= 0:
        return frame.close(x_label, "", f"{title}: no data", empty=True)
    room = 8 + CHARACTER * max((len(note) for note in bars.notes), default=0)
    x_axis = _Axis(0.0, max(totals), False, left, WIDTH - RIGHT - room)
    frame.grid(x_axis, None)
    for i, label in enumerate(bars.labels):
        y, at = frame.top + i * row + 4, 0.0
        frame.label(label, left - 6, y + 13)
        for n, name in enumerate(names):
            value = max(0.0, float(bars.parts[name][i]))
            x0, x1 = x_axis.at(at), x_axis.at(at + value)
            if x1 - x0 > 0.05:
                frame.add(
                    f'<rect x="{x0:.1f}" y="{y}" width="{x1 - x0:.1f}" height="{row - 8}" '
                    f'fill="{COLOURS[n % len(COLOURS)]}">'
                    f"<title>{escape(label)}, {escape(name)}: {_number(value)}</title></rect>"
                )
            at += value
        if i < len(bars.notes):
            frame.add(f'<text x="{x_axis.at(at) + 5:.1f}" y="{y + 13}">{escape(bars.notes[i])}</text>')
    spoken = f"{title}. {x_label}; " + ", ".join(
        f"{label} {_number(t)}" for label, t in zip(bars.labels, totals, strict=True)
    )
    return frame.close(x_label, "", spoken)


def dot_chart(title: str, x_label: str, rows: Sequence[Dots], *, alone: bool = False) -> str:
    """One row a run, one dot a seed. `x_label` names the unit."""
    longest = max((len(r.label) for r in rows), default=0)
    left = min(172.0, max(LEFT, 16 + CHARACTER * min(longest, 22)))
    height = 30
    frame = _Frame(title, [], alone, rows=height * len(rows))
    values = [v for r in rows for v in r.values]
    if not values:
        return frame.close(x_label, "", f"{title}: no data", empty=True)
    x_axis = _Axis(min(values), max(values), False, left, WIDTH - RIGHT, pad=0.08)
    frame.grid(x_axis, None)
    for i, r in enumerate(rows):
        y, colour = frame.top + i * height + height / 2, COLOURS[r.colour % len(COLOURS)]
        frame.label(r.label, left - 6, y + 4)
        frame.add(f'<line class="grid" x1="{left:.0f}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}"/>')
        for value, name in zip(r.values, r.names, strict=True):
            frame.add(
                f'<circle cx="{x_axis.at(value):.1f}" cy="{y:.1f}" r="5" fill="{colour}" fill-opacity=".75">'
                f"<title>{escape(r.label)}, {escape(name)}: {value:.6g}</title></circle>"
            )
        if r.values:
            x = x_axis.at(sum(r.values) / len(r.values))
            frame.add(
                f'<line x1="{x:.1f}" y1="{y - 10:.1f}" x2="{x:.1f}" y2="{y + 10:.1f}" stroke="{colour}" '
                f'stroke-width="2.5"><title>{escape(r.label)}, mean</title></line>'
            )
    spoken = f"{title}. {x_label}; " + ", ".join(
        f"{r.label} {sum(r.values) / len(r.values):.6g}" for r in rows if r.values
    )
    return frame.close(x_label, "", spoken)


# ---------------------------------------------------------------------------------------------------------- drawing


class _Key(NamedTuple):
    name: str
    colour: str
    dash: str


def _or(chosen: int | None, place: int) -> int:
    return place if chosen is None else chosen


class _Frame:
    """Title, legend and plot area; collects elements."""

    def __init__(self, title: str, legend: list[_Key], alone: bool, rows: int | None = None) -> None:
        self._alone, self._title = alone, title
        self._parts: list[str] = [f'<text class="heading" x="10" y="18">{escape(title)}</text>']
        self.top = float(TITLE_HEIGHT + 6)
        self._legend(legend)
        self.bottom = self.top + rows if rows is not None else HEIGHT - BOTTOM + max(0.0, self.top - TITLE_HEIGHT - 22)
        self.height = self.bottom + BOTTOM

    def _legend(self, keys: list[_Key]) -> None:
        x, y = 10.0, self.top + 6
        for name, colour, dash in keys:
            shown = name if len(name) <= 44 else name[:43] + "…"
            width = 30 + CHARACTER * len(shown)
            if x > 10 and x + width > WIDTH:
                x, y = 10.0, y + LEGEND_ROW
            self.add(
                f'<line x1="{x:.0f}" y1="{y:.0f}" x2="{x + 18:.0f}" y2="{y:.0f}" stroke="{colour}" stroke-width="4"'
                + (f' stroke-dasharray="{dash}"' if dash else "")
                + f'/><text x="{x + 22:.0f}" y="{y + 4:.0f}">{escape(shown)}</text>'
            )
            x += width
        if keys:
            self.top = y + 16

    def label(self, text: str, x: float, y: float) -> None:
        shown = text if len(text) <= 22 else text[:21] + "…"
        self.add(f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="end">{escape(shown)}<title>{escape(text)}</title></text>')

    def add(self, element: str) -> None:
        self._parts.append(element)

    def grid(self, x_axis: _Axis, y_axis: _Axis | None) -> None:
        for value in x_axis.ticks():
            x = x_axis.at(value)
            self.add(f'<line class="grid" x1="{x:.1f}" y1="{self.top:.1f}" x2="{x:.1f}" y2="{self.bottom:.1f}"/>')
            self.add(f'<text x="{x:.1f}" y="{self.bottom + 16:.1f}" text-anchor="middle">{x_axis.label(value)}</text>')
        for value in y_axis.ticks() if y_axis else ():
            y = y_axis.at(value)  # type: ignore[union-attr]
            self.add(f'<line class="grid" x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}"/>')
            self.add(
                f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{y_axis.label(value)}</text>'  # type: ignore[union-attr]
            )
        left = x_axis.start
        self.add(f'<path class="axis" fill="none" d="M{left:.1f} {self.top:.1f}V{self.bottom:.1f}H{WIDTH - RIGHT}"/>')

    def close(self, x_label: str, y_label: str, spoken: str, *, empty: bool = False) -> str:
        middle = (LEFT + WIDTH - RIGHT) / 2
        if empty:
            self.add(
                f'<text x="{WIDTH / 2}" y="{(self.top + self.bottom) / 2:.0f}" text-anchor="middle">no data</text>'
            )
        self.add(f'<text x="{middle:.0f}" y="{self.height - 8:.0f}" text-anchor="middle">{escape(x_label)}</text>')
        if y_label:
            y = (self.top + self.bottom) / 2
            self.add(
                f'<text transform="translate(13 {y:.0f}) rotate(-90)" text-anchor="middle">{escape(y_label)}</text>'
            )
        style = f"<style>{STYLE}{ALONE}</style>" if self._alone else ""
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" role="img" viewBox="0 0 {WIDTH} {self.height:.0f}">'
            f"<title>{escape(self._title)}</title><desc>{escape(spoken)}</desc>{style}{''.join(self._parts)}</svg>"
        )


class _Axis:
    """Maps values to units, linear or logarithmic, and chooses ticks."""

    def __init__(self, low: float, high: float, log: bool, start: float, end: float, pad: float = 0.0) -> None:
        self.start, self.end, self._log = start, end, log
        if high <= low:
            low, high = (
                (low / 2, low * 2) if log else (low - (abs(low) * 0.05 or 1.0), high + (abs(high) * 0.05 or 1.0))
            )
        self._low, self._high = (math.log10(low), math.log10(high)) if log else (low, high)
        span = self._high - self._low
        self._low, self._high = self._low - pad * span, self._high + max(pad, 0.02) * span
        self._step = 1.0

    def at(self, value: float) -> float:
        value = math.log10(value) if self._log else value
        return self.start + (value - self._low) / (self._high - self._low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        if self._log:
            decades = range(math.floor(self._low), math.ceil(self._high) + 1)
            span = self._high - self._low
            factors = (1, 2, 5) if span < 1.6 else (1, 3) if span < 3 else (1,)
            found = [f * 10.0**d for d in decades for f in factors]
            shown = [v for v in found if self._low <= math.log10(v) <= self._high]
            if len(shown) > 1:
                return shown[:: max(1, len(shown) // 6)]
            low, high = 10**self._low, 10**self._high
            return _linear_ticks(low, high)
        return _linear_ticks(self._low, self._high)

    def label(self, value: float) -> str:
        return _number(value)


def _linear_ticks(low: float, high: float, count: int = 6) -> list[float]:
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(f * power for f in (1, 2, 5, 10) if f * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _number(value: float) -> str:
    """4 digits at most, thousands as k, M, G."""
    size = abs(value)
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= limit * 0.99995:
            return f"{value / limit:.4g}{unit}"
    if size and size < 1e-3:
        return f"{value:.1e}"
    return f"{0.0 if size < 1e-12 else value:.4g}"


def _clean(s: Series, log_x: bool, log_y: bool) -> Series:
    pairs = []
    for x, y in zip(s.x, s.y, strict=True):
        bad = y is None or not math.isfinite(y) or not math.isfinite(x) or (log_y and y <= 0) or (log_x and x <= 0)
        if log_x and x <= 0:
            continue
        pairs.append((x, None if bad else y))
    if len(pairs) > MAX_POINTS and s.line:
        pairs = _thin(pairs)
    return replace(s, x=[p[0] for p in pairs], y=[p[1] for p in pairs])


def _thin(pairs: list[tuple[float, float | None]]) -> list[tuple[float, float | None]]:
    """The lowest and the highest point of each of MAX_POINTS / 2 stretches, in order: no spike is lost."""
    stretches = MAX_POINTS // 2
    kept: list[tuple[float, float | None]] = []
    for i in range(stretches):
        piece = pairs[i * len(pairs) // stretches : (i + 1) * len(pairs) // stretches]
        held = [p for p in piece if p[1] is not None]
        if not held:
            kept += piece[:1]
            continue
        extremes = {id(p): p for p in (min(held, key=lambda p: p[1]), max(held, key=lambda p: p[1]))}  # type: ignore[arg-type, return-value]
        kept += sorted(extremes.values(), key=lambda p: p[0])
    return kept


def _path(s: Series, x_axis: _Axis, y_axis: _Axis) -> str:
    pieces, pen = [], False
    for x, y in zip(s.x, s.y, strict=True):
        if y is None:
            pen = False
            continue
        pieces.append(f"{'L' if pen else 'M'}{x_axis.at(x):.1f} {y_axis.at(y):.1f}")
        pen = True
    return "".join(pieces)


def _ends(s: Series) -> tuple[float, float]:
    held = [y for y in s.y if y is not None]
    return held[0], held[-1]
