"""Who may import whom, and how long a function may get: read from the source, imports inside functions included."""

import ast
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import networkx as nx
import pytest

from prefect_rlhf.flows.algorithm.places import ALGORITHMS
from tests.house import (
    PACKAGE,
    PAGE,
    PICTURE,
    ROOMS,
    TABLE,
    boxes,
    file_arrows,
    files,
    floors,
    folders,
    imported,
    ours,
    picture,
    purpose,
    table,
)

MAY_IMPORT = {
    "flows": "tasks placement blocks files errors",
    "tasks": "placement engines files errors",
    "blocks": "placement files errors",
    "engines": "placement files errors",
    "placement": "files errors",
    "files": "errors",
    "errors": "",
}
"""Rooms: what each may import of the others. `files` and `errors` are the ground rooms of all."""
SUB_ROOMS: Mapping[str, Mapping[str, str]] = {
    "flows": {
        "commands": "planning algorithm algorithm.evaluation training training.spec forms forms.dictionary hardware .",
        "planning": "algorithm training training.choice forms hardware",
        "algorithm": "training training.spec forms hardware",
        "algorithm.evaluation": "algorithm forms",
        "training": "training.replan training.choice training.spec forms hardware",
        "training.replan": "training training.choice training.spec hardware",
        "training.choice": "training training.spec hardware",
        "training.spec": "training forms",
        "forms": "forms.dictionary",
        "forms.dictionary": "forms",
        "hardware": "",
        ".": "planning algorithm training forms hardware",
    },
    "tasks": {
        "profiling": "",
        "reporting": "reporting.pictures rl.evaluation running running.steps checkpoints data server .",
        "reporting.pictures": "",
        "rl": "rl.evaluation rl.settings data tracing .",
        "rl.settings": ".",
        "rl.evaluation": "rl data tracing .",
        "trackers": "running data .",
        "trial": "data running tracing .",
        "running": "running.steps running.switch checkpoints data server tracing .",
        "running.steps": "running data.rows",
        "running.switch": "running server",
        "checkpoints": "rl.evaluation tracing .",
        "data": "data.formats data.rows data.stored tracing .",
        "data.formats": "data.stored",
        "data.rows": "",
        "data.stored": "",
        "server": "",
        "tracing": ".",
        ".": "",
    },
    "blocks": {
        "worker": ".",
        ".": "worker",  # the package's front door shows it
    },
    "engines": {
        "losses": "",
        "functions": "",
        "functions.plays": "functions functions.signatures .",
        "functions.scoring": "functions",
        "functions.signatures": "functions",
        "gang": "gang.processes gang.ray",
        "gang.processes": "gang .",
        "gang.ray": "gang gang.processes weights",
        "rank": "functions functions.plays files sampling weights .",
        "rank.profiling": "rank losses megatron.cpu files weights .",
        "rank.trial": "functions.plays rank losses sampling .",
        "megatron": (
            "megatron.adapters megatron.cpu megatron.sampling megatron.training megatron.vocabulary "
            "files sampling weights ."
        ),
        "megatron.adapters": "megatron megatron.cpu weights .",
        "megatron.cpu": "megatron .",
        "megatron.sampling": "megatron sampling .",
        "megatron.training": "megatron megatron.adapters megatron.cpu losses .",
        "megatron.vocabulary": "megatron megatron.cpu .",
        "vllm": "vllm.cpu files sampling weights .",
        "vllm.cpu": "vllm .",
        "files": "sampling.chats weights .",
        "sampling": "sampling.chats .",
        "sampling.chats": "",
        "weights": ".",
        ".": "losses",
    },
    "placement": {
        "planner": (
            "planner.passes planner.space memory plans schedule cost cost.datasheets cost.times augmented layout "
            "search search.partial words devices ."
        ),
        "planner.passes": "planner planner.space memory plans schedule cost.datasheets search words devices .",
        "planner.space": (
            "planner augmented memory plans schedule cost cost.datasheets words layout models search rows devices ."
        ),
        "memory": "plans cost cost.datasheets words augmented layout models models.families rows devices .",
        "plans": "words layout models rows devices .",
        "schedule": "cost cost.datasheets plans augmented devices .",
        "cost": "cost.datasheets cost.times words augmented layout models rows devices .",
        "cost.datasheets": "models",
        "cost.times": "cost cost.datasheets models devices .",
        "words": "layout rows devices .",
        "augmented": "rows devices .",
        "layout": "models models.families devices .",
        "models": "models.families",
        "models.families": "models",
        "rows": "devices models .",
        "search": "search.exact search.partial search.rules search.sampling search.tables devices",
        "search.bound": "search search.tables",
        "search.exact": "search search.bound search.partial search.sampling search.tables",
        "search.partial": "search search.bound search.tables",
        "search.rules": "search search.bound search.partial search.tables",
        "search.sampling": "search search.partial search.tables",
        "search.tables": "search",
        "devices": "",
        ".": "models devices",
    },
    "files": {
        "storage": "hub .",
        "hub": ".",
        "processes": "",
        ".": "processes",
    },
    "errors": {
        ".": "",
    },
}
"""Sub-rooms: what each imports of its room, upper floors first; `.` is the room's root."""
SEAM = {
    "",
    "losses",
    "sampling.chats",
    "gang",
    "gang.processes",
    "gang.ray",
    "rank",
    "rank.trial",
    "rank.profiling",
    "weights",
    "files",
    "functions",
    "functions.plays",
    "functions.scoring",
    "functions.signatures",
}
"""Sub-rooms of engines that tasks may import, besides the root (values and protocols). The controller opens a gang,
calls methods of its ranks (also of ranks that profile or try operators), compares fingerprints, reads configs and
indexes, calls functions on hosts, reads chats as engines do, and says what a loss needs."""
HEAVY = {"torch", "megatron", "vllm", "prefect", "transformers", "ray"}
MAX_BODY_LINES = 60
MAX_FILE_LINES = 500
"""Limits of the tail. What most functions and files should be is far below: 25 and 300."""
MAX_BOXES = 16
MAX_FLOORS = 11
"""Limits of a folder: files and sub-rooms side by side, and the longest chain of imports between them."""


def inside(room: str) -> dict[str, Path]:
    return {name: path for name, path in files().items() if name.split(".")[0] == room}


def sub_room(name: str) -> str:
    """The folder that a file stands in, within its room; `.` for the room's root."""
    path = files()[name]
    folder = name if path.name == "__init__.py" else name.rpartition(".")[0]
    return folder.partition(".")[2] or "."


def test_every_room_has_files():
    """An empty room would make the tests below say nothing."""
    assert {room: bool(inside(room)) for room in ROOMS} == dict.fromkeys(ROOMS, True)
    assert set(SUB_ROOMS) == set(MAY_IMPORT) == set(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_rooms_that_it_may(room):
    allowed = {room, *MAY_IMPORT[room].split()}
    wrong = {
        f"{name} -> {other}"
        for name, path in inside(room).items()
        for other in ours(path)
        if other.split(".")[0] not in allowed
    }
    assert wrong == set()


@pytest.mark.parametrize("room", ROOMS)
def test_a_sub_room_imports_what_the_table_shows(room):
    """Nothing else, and all of it: the table is a picture of the house, not a wish."""
    seen: dict[str, set[str]] = {sub_room(name): set() for name in inside(room)}
    for name, path in inside(room).items():
        targets = {sub_room(other) for other in ours(path) if other.split(".")[0] == room}
        seen[sub_room(name)] |= targets - {sub_room(name)}
    assert seen == {name: set(targets.split()) for name, targets in SUB_ROOMS[room].items()}


@pytest.mark.parametrize("room", ROOMS)
def test_sub_rooms_have_no_circular_imports(room):
    """A sub-room's own sub-rooms belong to it. A room's root is none: it holds the doors and the vocabulary."""
    graph: nx.DiGraph = nx.DiGraph()
    for name, targets in SUB_ROOMS[room].items():
        ends = {target.split(".")[0] for target in targets.split()} - {name.split(".")[0], ""}
        graph.add_edges_from((name.split(".")[0], end) for end in ends if name != ".")
    assert list(nx.simple_cycles(graph)) == []


@pytest.mark.parametrize("folder", [name for name in folders() if name.count(".") == 1 or name in ROOMS])
def test_a_folders_files_and_sub_rooms_have_no_circular_imports(folder):
    """What stands side by side can be read one after another, from the lowest floor up."""
    assert list(nx.simple_cycles(boxes(folder))) == []


@pytest.mark.parametrize("folder", folders())
def test_a_folder_has_few_boxes_on_few_floors(folder):
    """The ground rooms count too."""
    graph = boxes(folder)
    assert len(graph) <= MAX_BOXES
    assert len(floors(graph)) <= MAX_FLOORS


def test_files_have_no_circular_imports():
    """Imports inside functions count: that is where circles hide. Those for type checkers alone do not."""
    assert list(nx.simple_cycles(file_arrows(typing_only=False))) == []


def test_tasks_know_no_engine_by_name():
    wrong = {
        f"{name} -> {other}"
        for name, path in inside("tasks").items()
        for other in ours(path)
        if other.split(".")[0] == "engines" and sub_room(other).removesuffix(".") not in SEAM
    }
    assert wrong == set()


@pytest.mark.parametrize(
    ("room", "heavy"),
    [
        ("errors", HEAVY),
        ("files", HEAVY),
        ("placement", HEAVY),
        ("flows", {"torch", "megatron", "vllm"}),
        ("blocks", {"torch", "megatron", "vllm"}),
    ],
)
def test_only_engines_and_tasks_import_heavy_libraries(room, heavy):
    wrong = {
        f"{name} -> {other}"
        for name, path in inside(room).items()
        for other in imported(path)
        if other.split(".")[0] in heavy
    }
    assert wrong == set()


@pytest.mark.parametrize("room", ROOMS)
def test_no_function_is_longer_than_a_page(room):
    """Lines of code from the first statement after the docstring; blank lines and comments are free."""
    long = {
        f"{name}.{node.name}: {lines}"
        for name, path in inside(room).items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if (lines := body_lines(path, node)) > MAX_BODY_LINES
    }
    assert long == set()


@pytest.mark.parametrize("room", ROOMS)
def test_no_file_is_too_long(room):
    lengths = {name: len(path.read_text().splitlines()) for name, path in inside(room).items()}
    assert {name: lines for name, lines in lengths.items() if lines > MAX_FILE_LINES} == {}


@pytest.mark.parametrize("room", ROOMS)
def test_every_module_has_a_docstring(room):
    assert [name for name, path in inside(room).items() if not ast.get_docstring(ast.parse(path.read_text()))] == []


def test_every_folder_states_its_purpose_in_one_line():
    """A folder without `__init__` would be in no table and no picture."""
    paths = {path.parent for room in ROOMS for path in inside(room).values()}
    assert len(paths) == len(folders())
    assert [name for name in folders() if not purpose(name).endswith(".")] == []


def test_the_drawing_of_the_house_matches_the_imports():
    """`python -m tests.house` draws it anew."""
    assert PICTURE.read_text() == picture()
    drawn = TABLE.search(PAGE.read_text())
    assert drawn is not None
    assert drawn[0] == table()


def body_lines(path: Path, node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    statements = node.body[1:] if ast.get_docstring(node) else node.body
    if not statements:
        return 0
    lines = path.read_text().splitlines()[statements[0].lineno - 1 : node.end_lineno]
    return sum(1 for line in lines if line.strip() and not line.strip().startswith("#"))


def test_importing_placement_loads_no_heavy_library():
    """The same as read from the source, seen in a fresh interpreter."""
    assert loaded_by(f"{PACKAGE}.{name}" for name in inside("placement")) == set()


def test_planning_an_algorithm_loads_no_engine():
    """Who asks what would be on devices that are not there waits for no torch."""
    flows = (f"{PACKAGE}.flows.{name.replace('-', '_')}" for name in ("commands.plan", *ALGORITHMS))
    assert loaded_by(flows) == {"prefect"}


def loaded_by(names: Iterable[str]) -> set[str]:
    """Which heavy packages a fresh interpreter has once it has imported these modules."""
    program = f"import sys, {', '.join(names)}; print(*sorted({HEAVY!r} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    return set(done.stdout.split())
