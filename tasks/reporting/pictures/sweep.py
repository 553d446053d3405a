"""A sweep as a picture: seconds, device-hours and static memory use over the number of devices, as SVG."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from prefect_rlhf.placement.planner.sweep import ENOUGH, Sweep
from prefect_rlhf.tasks.reporting.pictures.frame import framed

PANEL, GAP, HEIGHT = 360, 40, 260  # widths of a panel and between panels, height of the picture
LABEL = 84  # width for the name of a cluster
LEFT, TOP, BOTTOM = 20, 40, 44
COLOUR, MARK = "#4269d0", "#ff725c"


@dataclass(frozen=True, slots=True)
class Panel:
    """A value for each size (None: refused), how to write it, and a level to draw."""

    title: str
    values: tuple[float | None, ...]
    form: str
    level: float | None = None


def sweep_svg(sweep: Sweep) -> str:
    """Draw three panels side by side, a column for each size."""
    sizes = sweep.sizes
    panels = (
        Panel("seconds per iteration", tuple(size.seconds for size in sizes), ".3g"),
        Panel("device-hours per iteration", tuple(size.device_hours for size in sizes), ".3g"),
        Panel("static memory use", tuple(size.static_share for size in sizes), ".0%", ENOUGH),
    )
    one_kind = len({size.kind for size in sizes}) == 1
    labels = [f"{size.num_devices}" if one_kind else size.cluster for size in sizes]
    panel = max(PANEL, 0 if one_kind else LABEL * len(labels))
    width = len(panels) * (panel + GAP)
    parts: list[str] = []
    axis = "devices" if one_kind else "clusters"
    for index, each in enumerate(panels):
        parts += _panel(each, labels, axis, LEFT + index * (panel + GAP), panel)
    return framed(width, HEIGHT, parts)


def _panel(panel: Panel, labels: Sequence[str], axis: str, left: float, width: float) -> Iterator[str]:
    bottom = HEIGHT - BOTTOM
    drawn = [value for value in panel.values if value is not None]
    most = max([*drawn, panel.level or 0.0], default=0.0) or 1.0
    yield _text(left, 22, panel.title, "start")
    yield f'<line x1="{left}" y1="{bottom}" x2="{left + width}" y2="{bottom}" stroke="#999999"/>'
    column = width / max(1, len(labels))
    for index, (label, value) in enumerate(zip(labels, panel.values, strict=True)):
        middle = left + (index + 0.5) * column
        yield _text(middle, bottom + 16, label)
        if value is None:
            yield _text(middle, bottom - 6, "no plan")
            continue
        height = (bottom - TOP) * value / most
        yield (
            f'<rect x="{middle - column * 0.3:.1f}" y="{bottom - height:.1f}" width="{column * 0.6:.1f}" '
            f'height="{height:.1f}" rx="2" fill="{COLOUR}"/>'
        )
        yield _text(middle, bottom - height - 5, format(value, panel.form))
    yield _text(left + width / 2, bottom + 34, axis)
    if panel.level is not None:
        y = bottom - (bottom - TOP) * panel.level / most
        yield (
            f'<line x1="{left}" y1="{y:.1f}" x2="{left + width}" y2="{y:.1f}" stroke="{MARK}" stroke-dasharray="4 3"/>'
        )


def _text(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="#444444">{escape(text)}</text>'
