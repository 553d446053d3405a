"""The house as its own imports show it: rooms, sub-rooms, and who imports whom; imports inside functions included.

`python -m tests.house` draws docs/images/house.svg and the table of rooms in docs/internals/rooms.md anew, and
counts the lines of the files in docs/architecture.md.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import networkx as nx

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "prefect_rlhf"
ROOMS = ("flows", "tasks", "blocks", "engines", "placement", "files", "errors")
"""Each room imports only rooms that follow it."""
PICTURE = ROOT / "docs" / "images" / "house.svg"
PAGE = ROOT / "docs" / "internals" / "rooms.md"
READING = ROOT / "docs" / "architecture.md"
COUNTED = re.compile(r"(\[`([\w/]+\.py)`\]\(\.\./\2\) \| )(\d+)(?= \|)")
"""A file's link and number of lines in a table of `READING`."""
LISTED = re.compile(r"^(### [^\n]+: )(\d+)( lines\n.*?)(?=^##)", re.MULTILINE | re.DOTALL)
"""A list of files with its heading, which has their sum."""
TABLE = re.compile(r"(?<=<!-- rooms -->\n).*(?=<!-- end of rooms -->)", re.DOTALL)


@cache
def files() -> Mapping[str, Path]:
    """Every file of the package by its dotted name without the package's; a folder's `__init__` has the folder's."""
    found = {}
    for folder in (ROOT / room for room in ROOMS):
        for path in sorted(folder.rglob("*.py")):
            if "__pycache__" not in path.parts:
                found[".".join(path.relative_to(folder.parent).with_suffix("").parts).removesuffix(".__init__")] = path
    return found


@cache
def imported(path: Path, typing_only: bool = True) -> frozenset[str]:
    """Every absolute module name that a file imports, `from a import b` as both a and a.b."""
    tree = ast.parse(path.read_text())
    skipped = set() if typing_only else {id(n) for block in _type_checking(tree) for n in ast.walk(block)}
    names: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; a file entrypoint would load a second copy"
            names |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(names)


def _type_checking(tree: ast.Module) -> Iterator[ast.If]:
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield node


@cache
def ours(path: Path, typing_only: bool = True) -> frozenset[str]:
    """Our own files that a file imports, without the package's name; of `from a import b`, a.b where that is a file."""
    names = {name.removeprefix(f"{PACKAGE}.") for name in imported(path, typing_only) if name.startswith(f"{PACKAGE}.")}
    return frozenset(name for name in names & files().keys() if files()[name] != path)


@cache
def file_arrows(typing_only: bool = True) -> nx.DiGraph:
    """Files of the package; an arrow points to what is imported. A folder's `__init__` is left out."""
    graph: nx.DiGraph = nx.DiGraph()
    modules = [name for name, path in files().items() if path.name != "__init__.py" or ours(path)]
    graph.add_nodes_from(modules)
    for name in modules:
        graph.add_edges_from((name, other) for other in ours(files()[name], typing_only) if other in graph)
    return graph


def boxes(folder: str) -> nx.DiGraph:
    """Files and sub-rooms side by side in a folder, and the arrows between them."""
    graph: nx.DiGraph = nx.DiGraph()
    depth = folder.count(".") + 2
    inside = [name for name in file_arrows() if name.startswith(f"{folder}.")]
    graph.add_nodes_from(".".join(name.split(".")[:depth]) for name in inside)
    for source, target in file_arrows().subgraph(inside).edges:
        ends = tuple(".".join(name.split(".")[:depth]) for name in (source, target))
        if ends[0] != ends[1]:
            graph.add_edge(*ends)
    return graph


def floors(graph: nx.DiGraph) -> list[list[str]]:
    """Boxes by the longest chain of imports below them, the lowest floor first."""
    return [sorted(floor) for floor in nx.topological_generations(graph.reverse())]


def folders() -> list[str]:
    """Every room and sub-room."""
    return [name for name, path in files().items() if path.name == "__init__.py"]


def purpose(folder: str) -> str:
    """The line of a folder's `__init__` that states its purpose."""
    return (ast.get_docstring(ast.parse(files()[folder].read_text())) or "").split("\n")[0]


def table() -> str:
    """Rooms and sub-rooms with what each is for, as Markdown."""
    rows = [f"| `{name.replace('.', '/')}/` | {purpose(name)} |" for name in folders()]
    return "\n".join(["| room | purpose |", "|---|---|", *rows, ""])


WIDTH, MARGIN, LEFT = 1200, 12, 200
BOX_HEIGHT, FLOOR_HEIGHT, GAP, TITLE = 24, 58, 10, 26
LETTER = 7.2  # pixels of a character
FILLS = {"room": "#dbe7f5", "file": "#ffffff"}


def picture() -> str:
    """Rooms below each other, each with its floors: what a box imports lies below. Arrows that follow are left out."""
    drawings, top = [], MARGIN
    for room in ROOMS:
        graph = nx.transitive_reduction(boxes(room))
        rows = list(_rows(floors(graph)))
        drawings += _room(room, graph, rows, top)
        top += TITLE + len(rows) * FLOOR_HEIGHT + 2 * MARGIN
    size = f'width="{WIDTH}" height="{top}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    return "\n".join([head, f'<rect {size} fill="#f7f7f4"/>', *drawings, "</svg>\n"])


def _beside(room: str) -> str:
    """The other rooms that a room imports, in words."""
    others = {other for name, path in files().items() if name.split(".")[0] == room for other in ours(path)}
    rooms = [name for name in ROOMS if name != room and any(other.split(".")[0] == name for other in others)]
    return f"imports {', '.join(rooms)}" if rooms else "imports no other room"


def _rows(levels: list[list[str]]) -> Iterator[list[str]]:
    """The floors from the top, a wide one as several rows."""
    for level in reversed(levels):
        row: list[str] = []
        for box in level:
            if row and sum(map(_width, (*row, box))) > WIDTH - LEFT - 3 * MARGIN:
                yield row
                row = []
            row.append(box)
        yield row


def _width(box: str) -> float:
    return len(_label(box)) * LETTER + 2 * GAP


def _label(box: str) -> str:
    return box.split(".")[-1] + ("/" if box in folders() else "")


def _room(room: str, graph: nx.DiGraph, rows: list[list[str]], top: float) -> Iterator[str]:
    height = TITLE + len(rows) * FLOOR_HEIGHT + MARGIN
    yield f'<rect x="{MARGIN}" y="{top}" width="{WIDTH - 2 * MARGIN}" height="{height}" rx="6" fill="#ecece6"/>'
    yield f'<text x="{2 * MARGIN}" y="{top + 20}" font-size="16" font-weight="bold">{room}/</text>'
    yield f'<text x="{2 * MARGIN}" y="{top + 38}" fill="#66707a">{_beside(room)}</text>'
    places: dict[str, tuple[float, float]] = {}
    for index, row in enumerate(rows):
        space = WIDTH - LEFT - 2 * MARGIN - sum(map(_width, row))
        x = LEFT + space / (len(row) + 1)
        for box in row:
            places[box] = (x, top + TITLE + index * FLOOR_HEIGHT)
            x += _width(box) + space / (len(row) + 1)
    for source, target in sorted(graph.edges):
        (x1, y1), (x2, y2) = places[source], places[target]
        start, end = x1 + _width(source) / 2, x2 + _width(target) / 2
        yield (
            f'<path d="M{start:.0f} {y1 + BOX_HEIGHT:.0f} C{start:.0f} {y1 + FLOOR_HEIGHT:.0f} {end:.0f} '
            f'{y2 - FLOOR_HEIGHT / 2:.0f} {end:.0f} {y2:.0f}" fill="none" stroke="#9aa5b1"/>'
        )
    for box, (x, y) in places.items():
        fill = FILLS["room" if box in folders() else "file"]
        yield (
            f'<rect x="{x:.0f}" y="{y:.0f}" width="{_width(box):.0f}" height="{BOX_HEIGHT}" '
            f'rx="4" fill="{fill}" stroke="#66707a"/><text x="{x + _width(box) / 2:.0f}" y="{y + 16:.0f}" '
            f'text-anchor="middle">{_label(box)}</text>'
        )


def length(file: str) -> int:
    """The lines of a file of the repository."""
    return len((ROOT / file).read_text().splitlines())


def recounted(page: str) -> str:
    """The page with the number of lines that its files have today, and the sums of its lists."""
    counted = COUNTED.sub(lambda found: f"{found[1]}{length(found[2])}", page)
    sums = {found[1]: sum(int(lines) for *_, lines in COUNTED.findall(found[3])) for found in LISTED.finditer(counted)}
    return LISTED.sub(lambda found: f"{found[1]}{sums[found[1]]}{found[3]}", counted)


def main() -> None:
    """Draw picture and table anew, and count again."""
    PICTURE.write_text(picture())
    READING.write_text(recounted(READING.read_text()))
    PAGE.write_text(TABLE.sub(lambda _: table(), PAGE.read_text()))


if __name__ == "__main__":
    main()
