"""Draws a run's metrics over the steps as SVG: a small panel for each curve."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from math import isfinite
from types import MappingProxyType

from prefect_rlhf.tasks.reporting.pictures.frame import framed

COLUMNS, WIDTH, HEIGHT = 3, 400, 210  # panels in a row, and the size of a panel in pixels
LEFT, RIGHT, TOP, BOTTOM = 66, 16, 34, 30  # of a panel, around its curve
COLOUR, AXIS, GRID = "#4269d0", "#666666", "#e4e4e4"
MOST_DOTS = 40  # points of a curve up to which each is drawn as a dot

Curve = Sequence[tuple[int, float]]
"""Steps, ascending, and the values there."""
Band = Sequence[tuple[int, float, float]]
"""Steps, ascending, and the lower and the upper end of an interval there."""


def curves_svg(curves: Mapping[str, Curve], bands: Mapping[str, Band] = MappingProxyType({})) -> str:
    """Draw each curve in a panel under its name, three panels in a row, with its band if it has a band.

    Values that are not finite are left out.
    """
    drawn = {name: [(step, value) for step, value in curve if isfinite(value)] for name, curve in curves.items()}
    drawn = {name: curve for name, curve in drawn.items() if curve}
    steps = [step for curve in drawn.values() for step, _ in curve] or [0]
    first, last = min(steps), max(steps)
    rows = -(-len(drawn) // COLUMNS) or 1
    parts: list[str] = []
    for place, (name, curve) in enumerate(drawn.items()):
        row, column = divmod(place, COLUMNS)
        parts.append(f'<g transform="translate({column * WIDTH} {row * HEIGHT})">')
        band = [each for each in bands.get(name, ()) if all(map(isfinite, each))]
        parts += [*_panel(name, curve, band, first, last), "</g>"]
    return framed(COLUMNS * WIDTH, rows * HEIGHT, parts)


def _panel(name: str, curve: Curve, band: Band, first: int, last: int) -> Iterator[str]:
    low, high = _range([*(value for _, value in curve), *(end for _, *ends in band for end in ends)])
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    across = (right - LEFT) / max(1, last - first)

    def at(step: int, value: float) -> tuple[float, float]:
        return LEFT + (step - first) * across, bottom - (bottom - TOP) * (value - low) / (high - low)

    points = [at(step, value) for step, value in curve]
    yield _text(LEFT, 18, name, "start", weight="600")
    yield _text(right, 18, f"{curve[-1][1]:.4g}", "end", COLOUR, "600")
    labels = _told_apart([high, (low + high) / 2, low])
    for label, y in zip(labels, (TOP, (TOP + bottom) / 2, bottom), strict=True):
        yield f'<line x1="{LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="{GRID}"/>'
        yield _text(LEFT - 6, y + 4, label, "end")
    yield _text(LEFT, bottom + 16, f"step {first}", "start")
    if last > first:
        yield _text(right, bottom + 16, f"{last}", "end")
    if band:
        around = [*(at(step, top) for step, _, top in band), *(at(step, end) for step, end, _ in reversed(band))]
        yield f'<polygon points="{_places(around)}" fill="{COLOUR}" fill-opacity="0.15"/>'
    places = _places(points)
    yield f'<polyline points="{places}" fill="none" stroke="{COLOUR}" stroke-width="1.8"/>'
    for x, y in points if len(points) <= MOST_DOTS else points[-1:]:
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="{COLOUR}"/>'


def _places(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Return a lowest and a highest value that differ, however near the values are to each other."""
    low, high = min(values), max(values)
    least = 1e-3 * max(abs(low), abs(high)) or 1.0
    if high - low >= least:
        return low, high
    middle = low / 2 + high / 2
    return middle - least / 2, middle + least / 2


def _told_apart(values: Sequence[float]) -> list[str]:
    """Write values with as few digits, from three, as make them differ.

    >>> _told_apart([8.004, 8.0, 7.996])
    ['8.004', '8', '7.996']
    """
    texts = [[f"{value:.{digits}g}" for value in values] for digits in range(3, 18)]
    return next((each for each in texts if len(set(each)) == len(values)), texts[-1])


def _text(x: float, y: float, text: str, anchor: str, colour: str = AXIS, weight: str = "400") -> str:
    words = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}" font-weight="{weight}"'
    return f"<text {words}>{escape(text)}</text>"
