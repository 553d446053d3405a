"""A plan's memory as a picture: for each kind of device, a bar shows its fullest moment by owner, as SVG."""

from collections.abc import Iterator, Mapping
from html import escape

from prefect_rlhf.placement.cost.datasheets.hardware import GIB
from prefect_rlhf.placement.devices.mesh import ClusterShape, DeviceMesh
from prefect_rlhf.placement.memory.bytes import byte_size
from prefect_rlhf.placement.memory.certificate import Certificate, Peak, during
from prefect_rlhf.tasks.reporting.pictures.frame import framed

LEFT, BAR, WIDTH, MARGIN = 20, 26, 720, 20  # of the bars; a bar is as wide as its device's memory
ROW, LINE = 56, 18  # heights of a bar with its title, and of a line of the legend
SHOWN = 11  # owners with a colour; all others share the last
COLOURS = (
    "#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5", "#9c6b4e", "#9498a0",
    "#c2b280", "#d9d9d9",
)  # fmt: skip

OTHERS = "all others"


def memory_svg(certificate: Certificate, cluster: ClusterShape) -> str:
    """Draw each kind of device's peak by owner; a line marks how much a plan may use."""
    bars = certificate.by_devices()
    totals: dict[str, int] = {}
    for peak in bars.values():
        for name, num_bytes in _owners(peak).items():
            totals[name] = max(totals.get(name, 0), num_bytes)
    named = sorted(totals, key=lambda name: -totals[name])[:SHOWN]
    colours = dict(zip([*named, OTHERS], COLOURS, strict=False))
    legend = [*named, *([OTHERS] if len(totals) > SHOWN else [])]
    height = MARGIN + ROW * len(bars) + LINE * (len(legend) + 1) + MARGIN
    width = LEFT + WIDTH + MARGIN
    parts: list[str] = []
    for index, (devices, peak) in enumerate(bars.items()):
        whole = cluster.whole_memory_bytes(DeviceMesh.parse(devices.partition(", ")[0]).first_node)
        parts += _bar(devices, peak, whole, MARGIN + ROW * index, colours)
    top = MARGIN + ROW * len(bars) + LINE
    for index, name in enumerate(legend):
        y = top + LINE * index
        parts.append(f'<rect x="{LEFT}" y="{y - 9}" width="10" height="10" fill="{colours[name]}"/>')
        parts.append(_text(LEFT + 16, y, name))
    return framed(width, height, parts)


def _owners(peak: Peak) -> Mapping[str, int]:
    """The bytes of a peak by owner and kind, the largest first; a node's own bytes are those of its call."""
    found: dict[str, int] = {}
    for share in sorted(peak.shares, key=lambda share: -share.num_bytes):
        name = f"{share.owner.partition('@')[0]}: {share.what}"
        found[name] = found.get(name, 0) + share.num_bytes
    return found


def _bar(devices: str, peak: Peak, whole: int, top: float, colours: Mapping[str, str]) -> Iterator[str]:
    title = f"{devices} {during(peak.node)}: {peak.num_bytes / GIB:.1f} of {whole / GIB:.1f} GiB"
    yield _text(LEFT, top + 12, title)
    yield f'<rect x="{LEFT}" y="{top + 18}" width="{WIDTH}" height="{BAR}" fill="#f4f4f4" stroke="#999999"/>'
    scale = WIDTH / max(1, whole, peak.num_bytes)
    left = float(LEFT)
    for name, num_bytes in _owners(peak).items():
        width = num_bytes * scale
        yield (
            f'<rect x="{left:.2f}" y="{top + 18}" width="{width:.2f}" height="{BAR}" '
            f'fill="{colours.get(name, colours.get(OTHERS, COLOURS[-1]))}">'
            f"<title>{escape(name)} {byte_size(num_bytes)}</title></rect>"
        )
        left += width
    limit = LEFT + peak.device_bytes * scale
    yield (
        f'<line x1="{limit:.2f}" y1="{top + 14}" x2="{limit:.2f}" y2="{top + 22 + BAR}" stroke="#ff725c" '
        f'stroke-dasharray="4 3"><title>a plan may fill {byte_size(peak.device_bytes)}</title></line>'
    )


def _text(x: float, y: float, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="#444444">{escape(text)}</text>'
