"""A timeline as SVG: which node ran on which devices and when, with a lane per device and a bar per node."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import combinations, pairwise
from math import floor, log10
from types import MappingProxyType

import networkx as nx

from prefect_rlhf.tasks.reporting.pictures.frame import framed

WIDTH = 1200
LEFT, RIGHT, TOP = 92, 16, 44
LANE, GAP, AXIS = 44, 10, 34  # heights of a lane, between lanes, and of the time axis below them
TEXT_WIDTH = 6.3  # a character at 11 px

COLOURS: Mapping[str, str] = MappingProxyType(
    {
        "generate": "#4269d0",
        "inference": "#3ca951",
        "train_step": "#ff725c",
        "compute": "#efb118",
        "transfer": "#9498a0",
        "reallocate": "#a463f2",
        "follow": "#6a3d9a",
        "offload": "#9c6b4e",
        "reload": "#6cc5b0",
        "checkpoint": "#ff8ab7",
        "commit": "#b5487a",
        "export": "#97bbf5",
        "switch": "#4f5d75",
    }
)


@dataclass(frozen=True, slots=True)
class Bar:
    """A node that ran on `devices` (as `n0:1`) from `start` to `end`, in seconds on a common clock."""

    title: str
    kind: str
    devices: tuple[str, ...]
    start: float
    end: float


def timeline_svg(bars: Sequence[Bar]) -> str:
    """Draw bars, 1200 px wide. Bars that overlap in time on a device share its lane's height.

    Neighbouring devices that run the same node share a bar. The whole title is shown if it fits, and on hovering. A
    node without devices, such as the commit of a checkpoint, has no lane.
    """
    bars = [bar for bar in bars if bar.devices]
    lanes = sorted({device for bar in bars for device in bar.devices}, key=_device_key)
    begin = min((bar.start for bar in bars), default=0.0)
    seconds = max((bar.end for bar in bars), default=begin) - begin or 1.0
    height = TOP + len(lanes) * (LANE + GAP) + AXIS
    parts = [*_legend(bars), *_axis(seconds, TOP + len(lanes) * (LANE + GAP)), *_lanes(lanes)]
    parts += [_bar(bar, begin, seconds, top, height) for bar, top, height in _placed(bars, lanes)]
    return framed(WIDTH, height, parts)


def _device_key(device: str) -> tuple[tuple[int, ...], str]:
    digits = "".join(character if character.isdigit() else " " for character in device).split()
    return tuple(map(int, digits)), device


def _placed(bars: Sequence[Bar], lanes: Sequence[str]) -> Iterator[tuple[Bar, float, float]]:
    """Each bar with its top and its height in every unbroken run of its lanes.

    A bar that shares its time with others on some device has a row of its own in each lane.
    """
    order = sorted(set(bars), key=lambda bar: (bar.start, bar.end, bar.title, bar.devices))
    rows = _rows(order)
    beside: nx.Graph[Bar] = nx.Graph()
    beside.add_nodes_from(order)
    beside.add_edges_from((one, other) for one, other in combinations(order, 2) if _touch(one, other))
    for together in nx.connected_components(beside):
        count = 1 + max(rows[bar] for bar in together)
        for bar in sorted(together, key=order.index):
            indices = sorted(lanes.index(device) for device in set(bar.devices))
            for first, last in _runs(indices) if count == 1 else zip(indices, indices, strict=True):
                whole = (last - first + 1) * (LANE + GAP) - GAP
                yield bar, TOP + first * (LANE + GAP) + whole * rows[bar] / count, whole / count


def _runs(indices: Sequence[int]) -> Iterator[tuple[int, int]]:
    """First and last of each run of consecutive numbers."""
    starts = [indices[0], *(after for before, after in pairwise(indices) if after != before + 1)]
    ends = [*(before for before, after in pairwise(indices) if after != before + 1), indices[-1]]
    yield from zip(starts, ends, strict=True)


def _rows(order: Sequence[Bar]) -> dict[Bar, int]:
    """The lowest row without a conflicting earlier bar."""
    rows: dict[Bar, int] = {}
    for bar in order:
        taken = {rows[other] for other in rows if _touch(bar, other)}
        rows[bar] = next(row for row in range(len(taken) + 1) if row not in taken)
    return rows


def _touch(one: Bar, other: Bar) -> bool:
    overlap = one.start < other.end and other.start < one.end
    return overlap and not set(one.devices).isdisjoint(other.devices)


def _bar(bar: Bar, begin: float, seconds: float, top: float, height: float) -> str:
    scale = (WIDTH - LEFT - RIGHT) / seconds
    x, width = LEFT + (bar.start - begin) * scale, max(1.0, (bar.end - bar.start) * scale)
    colour = COLOURS.get(bar.kind, "#bbbbbb")
    tip = escape(f"{bar.title} · {bar.end - bar.start:.3g} s")
    label = _label(bar.title, width)
    text = (
        f'<text x="{x + 5:.1f}" y="{top + height / 2 + 4:.1f}" fill="#ffffff">{escape(label)}</text>'
        if label and height >= 13
        else ""
    )
    return (
        f"<g><title>{tip}</title>"
        f'<rect x="{x:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}" rx="2" fill="{colour}" '
        f'stroke="#ffffff" stroke-width="0.6"/>{text}</g>'
    )


def _label(title: str, width: float) -> str:
    """The longest part of the title, cut at its separators, that fits, at least the role; else an empty text."""
    parts = title.split(" · ")
    labels = [" · ".join(parts[:count]) for count in range(len(parts), 0, -1)]
    fitting = (text for text in (*labels, parts[0].partition(".")[0]) if len(text) * TEXT_WIDTH + 10 <= width)
    return next(fitting, "")


def _legend(bars: Sequence[Bar]) -> Iterator[str]:
    x = float(LEFT)
    for kind in [kind for kind in COLOURS if any(bar.kind == kind for bar in bars)]:
        yield f'<rect x="{x:.1f}" y="14" width="12" height="12" rx="2" fill="{COLOURS[kind]}"/>'
        yield _text(x + 17, 24, kind)
        x += 17 + len(kind) * TEXT_WIDTH + 22


def _lanes(lanes: Sequence[str]) -> Iterator[str]:
    width = WIDTH - LEFT - RIGHT
    for index, device in enumerate(lanes):
        top = TOP + index * (LANE + GAP)
        yield f'<rect x="{LEFT}" y="{top}" width="{width}" height="{LANE}" fill="#7f7f7f" opacity="0.07"/>'
        yield _text(LEFT - 10, top + LANE / 2 + 4, device, "end")


def _axis(seconds: float, bottom: float) -> Iterator[str]:
    step = _nice(seconds / 10)
    for tick in range(floor(seconds / step + 1e-9) + 1):
        x = LEFT + tick * step / seconds * (WIDTH - LEFT - RIGHT)
        yield f'<line x1="{x:.1f}" y1="{TOP - 4}" x2="{x:.1f}" y2="{bottom:.1f}" stroke="#dddddd"/>'
        yield _text(x, bottom + 14, f"{tick * step:g}{' s' if tick == 0 else ''}", "middle")


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="#444444">{escape(text)}</text>'


def _nice(seconds: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that is at least `seconds`.

    >>> _nice(0.7), _nice(3.1), _nice(11)
    (1.0, 5.0, 20.0)
    """
    power = 10.0 ** floor(log10(seconds))
    return next(power * factor for factor in (1.0, 2.0, 5.0, 10.0) if power * factor >= seconds * (1 - 1e-9))
