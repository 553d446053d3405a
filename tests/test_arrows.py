"""Who may import whom, and how long a function may get: read from the source, imports inside functions included."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import networkx as nx
import pytest

from prefect_rlhf.flows.rlhf_flow import ALGORITHMS

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "prefect_rlhf"
ROOMS = ("flows", "tasks", "placement", "engines", "blocks")
MAY_IMPORT = {
    "flows": {"tasks", "placement", "blocks"},
    "tasks": {"placement", "engines"},
    "placement": set(),
    "engines": {"placement"},
    "blocks": {"placement"},
}
PROTOCOLS = {"engine", "gang", "orders", "rows", "compute"}  # values and protocols that tasks share with engines
CONTROLLER = {"open_gang", "versions", "huggingface", "checkpoint_files", "saved_state", "profiling"}
"""What the controller runs itself: it opens a gang (of ranks that profile too), compares fingerprints, reads configs
and indexes."""
HEAVY = {"torch", "megatron", "vllm", "prefect", "transformers", "ray"}
MAX_BODY_LINES = 60
MAX_FILE_LINES = 500
"""Limits of the tail. What most functions and files should be is far below: 25 and 300."""


def files(room: str) -> list[Path]:
    return sorted(path for path in (ROOT / room).rglob("*.py") if "__pycache__" not in path.parts)


def module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path: Path, typing_only: bool = True) -> set[str]:
    """Every absolute module name that a file imports, `from a import b` as both a and a.b."""
    tree = ast.parse(path.read_text())
    skipped = set() if typing_only else {id(n) for block in type_checking(tree) for n in ast.walk(block)}
    names: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; a file entrypoint would load a second copy"
            names |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def type_checking(tree: ast.Module) -> Iterator[ast.If]:
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield node


def ours(names: set[str]) -> set[str]:
    """Our modules among them, without the package's name."""
    return {name.removeprefix(f"{PACKAGE}.") for name in names if name.startswith(f"{PACKAGE}.")}


def test_every_room_has_files():
    """An empty room would make the tests below say nothing."""
    assert {room: bool(files(room)) for room in ROOMS} == dict.fromkeys(ROOMS, True)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_rooms_that_it_may(room):
    wrong = {
        f"{module(path)} -> {name}"
        for path in files(room)
        for name in ours(imported(path))
        if name.split(".")[0] not in MAY_IMPORT[room] | {room}
    }
    assert wrong == set()


def test_tasks_know_no_engine_by_name():
    wrong = {
        f"{module(path)} -> {name}"
        for path in files("tasks")
        for name in ours(imported(path))
        if name.startswith("engines.") and name.split(".")[1] not in PROTOCOLS | CONTROLLER
    }
    assert wrong == set()


def test_placement_imports_nothing_heavy():
    wrong = {
        f"{module(path)} -> {name}"
        for path in files("placement")
        for name in imported(path)
        if name.split(".")[0] in HEAVY
    }
    assert wrong == set()


@pytest.mark.parametrize("room", ["flows", "placement", "blocks"])
def test_only_engines_and_tasks_import_torch(room):
    wrong = {
        f"{module(path)} -> {name}"
        for path in files(room)
        for name in imported(path)
        if name.split(".")[0] in {"torch", "megatron", "vllm"}
    }
    assert wrong == set()


def test_files_import_each_other_in_no_circle():
    """Imports inside functions count: that is where circles hide. Those for type checkers alone do not."""
    graph: nx.DiGraph = nx.DiGraph()
    known = {module(path) for room in ROOMS for path in files(room)}
    for room in ROOMS:
        for path in files(room):
            targets = ours(imported(path, typing_only=False)) & known - {module(path)}
            graph.add_edges_from((module(path), name) for name in targets if not module(path).startswith(f"{name}."))
    assert list(nx.simple_cycles(graph)) == []


@pytest.mark.parametrize("room", ROOMS)
def test_no_function_is_longer_than_a_page(room):
    """Lines of code from the first statement after the docstring; blank lines and comments are free."""
    long = {
        f"{module(path)}.{node.name}: {lines}"
        for path in files(room)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if (lines := body_lines(path, node)) > MAX_BODY_LINES
    }
    assert long == set()


@pytest.mark.parametrize("room", ROOMS)
def test_no_file_is_too_long(room):
    long = {module(p): lines for p in files(room) if (lines := len(p.read_text().splitlines())) > MAX_FILE_LINES}
    assert long == {}


@pytest.mark.parametrize("room", ROOMS)
def test_every_module_says_what_it_is(room):
    assert [module(path) for path in files(room) if not ast.get_docstring(ast.parse(path.read_text()))] == []


def body_lines(path: Path, node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    statements = node.body[1:] if ast.get_docstring(node) else node.body
    if not statements:
        return 0
    lines = path.read_text().splitlines()[statements[0].lineno - 1 : node.end_lineno]
    return sum(1 for line in lines if line.strip() and not line.strip().startswith("#"))


def test_importing_placement_loads_nothing_heavy():
    """The same as read from the source, seen in a fresh interpreter."""
    assert loaded_by(f"{PACKAGE}.{module(path)}" for path in files("placement")) == set()


def test_planning_an_algorithm_loads_no_engine():
    """Who asks what would be on devices that are not there waits for no torch."""
    flows = (f"{PACKAGE}.flows.{name}" for name in ("commands.plan", *ALGORITHMS))
    assert loaded_by(flows) == {"prefect"}


def loaded_by(names: Iterable[str]) -> set[str]:
    """Which heavy packages a fresh interpreter has once it has imported these modules."""
    program = f"import sys, {', '.join(names)}; print(*sorted({HEAVY!r} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    return set(done.stdout.split())
