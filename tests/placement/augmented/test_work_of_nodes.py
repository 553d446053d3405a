"""Each consumer handles each kind of work of a node: mypy proves it for a match that ends in `assert_never`."""

import ast
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

ROOT = Path(__file__).resolve().parents[3]
FOR_SOME_KINDS = {"_add_overwrites", "_held_version", "_written_version", "windows"}
"""Functions that do nothing for the kinds that they do not name: these change no weights, name no version that they
find, or open no window."""


def matches_on_work() -> dict[str, ast.Match]:
    """The last match of each function of the product on a node's work."""
    return {
        function.name: statement
        for room in ("placement", "tasks", "flows")
        for file in (ROOT / room).rglob("*.py")
        if "augmented.work import" in (text := file.read_text())
        for function in ast.walk(ast.parse(text))
        if isinstance(function, ast.FunctionDef)
        for statement in ast.walk(function)
        if isinstance(statement, ast.Match) and ast.unparse(statement.subject) in ("work", "node.work", "self.work")
    }


def test_a_match_on_work_names_every_kind_for_mypy():
    """With a new kind, mypy reports an argument of assert_never in each of these functions."""
    matches = matches_on_work()
    assert len(matches) >= 10
    for function, statement in matches.items():
        ends = ast.unparse(statement.cases[-1]).replace("\n", " ").split()
        is_complete = ends[:2] == ["case", "_:"] and ends[2].startswith("assert_never(")
        assert is_complete != (function in FOR_SOME_KINDS), function
