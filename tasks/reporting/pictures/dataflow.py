"""An iteration's dataflow graph as picture and text: calls, the keys they read, the versions they wait for."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape

import networkx as nx

from prefect_rlhf.placement.graph import Call, DataflowGraph, VersionEdge
from prefect_rlhf.tasks.reporting.pictures.frame import framed
from prefect_rlhf.tasks.reporting.pictures.timeline import COLOURS

LETTER, PADDING = 6.6, 12  # width of a character at 12 px, and space next to a box's text
BOX, FLOOR, GAP, MARGIN = 42, 96, 28, 24  # heights of a box and a floor; between boxes, and around the picture
DATA = "#c8ccd2"
HEAD = (
    '<defs><marker id="end" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path d="M0 0L8 4L0 8z" fill="#66707a"/></marker></defs>'
)


@dataclass(frozen=True, slots=True)
class Box:
    """A dataset or call with its place: the upper left corner and the width."""

    title: str
    below: str
    colour: str
    x: float
    y: float
    width: float


def dataflow_text(graph: DataflowGraph) -> str:
    """Return each call with its inputs and the version that it waits for, in the body's order."""
    lines = [f"{graph.name}: one iteration"]
    lines += [f"{dataset.name}  dataset of {', '.join(dataset.keys)}" for dataset in graph.datasets]
    versions = graph.version_edges()
    for call in graph:
        lines.append(f"{call.name}  {_what(call)}" + (f" -> {', '.join(call.outputs)}" if call.outputs else ""))
        lines += [f"    {', '.join(port.keys)} <- {port.source}" for port in call.inputs]
        lines += [f"    which rows <- {name}" for name in call.waits_for_choices]
        lines += [f"    {edge.role} <- {edge.source} ({_when(edge)})" for edge in versions if edge.target == call.name]
        if (follows := _follows(graph, call)) is not None:
            lines.append(f"    {call.role} <- {follows}")
    return "\n".join(lines)


def dataflow_svg(graph: DataflowGraph) -> str:
    """Draw datasets and calls, inputs above their readers; dashed lines are versions of weights or state.

    A dashed line on the right leads from a train_step to the next iteration's call.
    """
    boxes = dict(_boxes(graph))
    right = max(box.x + box.width for box in boxes.values())
    later = [edge for edge in graph.version_edges() if edge.lag > 0 and edge.source != edge.target]
    width = right + MARGIN + GAP * (1 + len({edge.source for edge in later}))
    height = max(box.y for box in boxes.values()) + BOX + MARGIN
    edges = [_data_line(boxes[port.source], boxes[call.name], port.keys) for call in graph for port in call.inputs]
    edges += [
        _data_line(boxes[name], boxes[call.name], ("which rows",)) for call in graph for name in call.waits_for_choices
    ]
    sides = {source: right + GAP * (1 + i) for i, source in enumerate(dict.fromkeys(edge.source for edge in later))}
    edges += [_later_line(boxes, edge, sides[edge.source]) for edge in later]
    edges += [
        _line(_below(boxes[edge.source]), _above(boxes[edge.target]), f"{edge.role}: {_when(edge)}", dashed=True)
        for edge in graph.version_edges()
        if edge.lag == 0
    ]
    return framed(width, height, [HEAD, *edges, *map(_drawn, boxes.values())], font_size=12)


def floors(graph: DataflowGraph) -> list[list[str]]:
    """Arrange datasets and calls in floors: an input is on an earlier floor than its readers.

    Within a floor they are ordered by the mean place of their inputs, which keeps lines short.
    """
    order: nx.DiGraph[str] = nx.DiGraph()
    order.add_nodes_from([*(data.name for data in graph.datasets), *(call.name for call in graph)])
    order.add_edges_from((port.source, call.name) for call in graph for port in call.inputs)
    order.add_edges_from((name, call.name) for call in graph for name in call.waits_for_choices)
    order.add_edges_from((edge.source, edge.target) for edge in graph.version_edges() if edge.lag == 0)
    places: dict[str, float] = {}
    levels = []
    for level in nx.topological_generations(order):
        above = {name: [places[source] for source in order.predecessors(name)] for name in level}
        levels.append(sorted(level, key=lambda name: sum(above[name]) / max(1, len(above[name]))))
        places |= {name: (index + 0.5) / len(level) for index, name in enumerate(levels[-1])}
    return levels


def _follows(graph: DataflowGraph, call: Call) -> str | None:
    """Return how the model of a call follows another, for people."""
    follows = graph.model(call.role).follows if call.role else None
    if follows is None:
        return None
    often = "step" if follows.every == 1 else f"{follows.every} steps"
    taken = "a copy of it" if follows.share == 1 else f"{follows.share:g} of it"
    return f"follows {follows.leader}: {taken} every {often}"


def _boxes(graph: DataflowGraph) -> Iterator[tuple[str, Box]]:
    state = {edge.target for edge in graph.version_edges() if edge.source == edge.target and edge.role == edge.source}
    texts: dict[str, tuple[str, str]] = {data.name: ("dataset", DATA) for data in graph.datasets}
    texts |= {
        call.name: (_what(call) + (" with state" if call.name in state else ""), COLOURS[call.kind]) for call in graph
    }
    for call in graph:
        if (follows := _follows(graph, call)) is not None:
            texts[call.name] = f"{_what(call)}, {follows}", COLOURS[call.kind]
    levels = floors(graph)
    widths = {name: max(len(name), len(texts[name][0])) * LETTER + 2 * PADDING for name in texts}
    widest = max(sum(widths[name] + GAP for name in level) - GAP for level in levels)
    for number, level in enumerate(levels):
        x = MARGIN + (widest - sum(widths[name] + GAP for name in level) + GAP) / 2
        for name in level:
            yield name, Box(name, *texts[name], x, MARGIN + number * FLOOR, widths[name])
            x += widths[name] + GAP


def _what(call: Call) -> str:
    words = [call.kind.replace("_", " ")] + ([f"of {call.role}"] if call.role else [])
    return " ".join([*words, f"every {call.every} steps"] if call.every is not None else words)


def _when(edge: VersionEdge) -> str:
    return {0: "of this step", 1: "of the step before"}.get(edge.lag, f"of {edge.lag} steps before")


def _above(box: Box) -> tuple[float, float]:
    return box.x + box.width / 2, box.y


def _below(box: Box) -> tuple[float, float]:
    return box.x + box.width / 2, box.y + BOX


def _data_line(source: Box, target: Box, keys: tuple[str, ...]) -> str:
    return _line(_below(source), _above(target), f"{target.title} reads {', '.join(keys)} of {source.title}")


def _line(start: tuple[float, float], end: tuple[float, float], title: str, dashed: bool = False) -> str:
    (x1, y1), (x2, y2) = start, end
    bend = max(FLOOR - BOX, (y2 - y1) / 2) * 0.6
    path = f"M{x1:.0f} {y1:.0f} C{x1:.0f} {y1 + bend:.0f} {x2:.0f} {y2 - bend:.0f} {x2:.0f} {y2:.0f}"
    return _path(path, title, dashed)


def _later_line(boxes: Mapping[str, Box], edge: VersionEdge, side: float) -> str:
    """From the right of a train_step around the picture to the right of what reads the version in a later step."""
    source, target = boxes[edge.source], boxes[edge.target]
    y1, y2 = source.y + BOX * 0.7, target.y + BOX * 0.3
    start, end = source.x + source.width, target.x + target.width
    path = f"M{start:.0f} {y1:.0f} H{side - 8:.0f} Q{side:.0f} {y1:.0f} {side:.0f} {y1 - 8:.0f} V{y2 + 8:.0f} "
    path += f"Q{side:.0f} {y2:.0f} {side - 8:.0f} {y2:.0f} H{end:.0f}"
    return _path(path, f"{target.title} uses the {edge.role} {_when(edge)}, which {source.title} made", dashed=True)


def _path(path: str, title: str, dashed: bool) -> str:
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    line = f'<path d="{path}" fill="none" stroke="#66707a"{dash} marker-end="url(#end)">'
    return f"{line}<title>{escape(title)}</title></path>"


def _drawn(box: Box) -> str:
    middle = box.x + box.width / 2
    place = f'x="{box.x:.0f}" y="{box.y:.0f}" width="{box.width:.0f}" height="{BOX}"'
    return (
        f'<rect {place} rx="5" fill="#ffffff"/><rect {place} rx="5" fill="{box.colour}" fill-opacity="0.25" '
        f'stroke="{box.colour}"/><text text-anchor="middle"><tspan x="{middle:.0f}" y="{box.y + 18:.0f}" '
        f'font-weight="bold">{escape(box.title)}</tspan><tspan x="{middle:.0f}" y="{box.y + 33:.0f}" fill="#45505a">'
        f"{escape(box.below)}</tspan></text>"
    )
