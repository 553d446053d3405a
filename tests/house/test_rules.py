"""The rules of CONTRIBUTING.md that no other test holds, and its table of rules itself."""

import ast
import re
from pathlib import Path

import pytest

from tests.house import ROOMS, files

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
RULES = [line.strip("|").rpartition(" | ") for line in PAGE.splitlines() if line.startswith("| ") and "::" in line]
CHANGELOG_LINES = 40
STATE = {
    "AsyncAttemptEngine",
    "AttemptEngine",
    "Conversation",
    "CountedSteps",
    "FileLock",
    "Findings",
    "FlowProcess",
    "LayerClock",
    "LeasedMesh",
    "LoadedModel",
    "OpenPlay",
    "Outcome",
    "PlayRow",
    "PlanSwitcher",
    "PriceCheck",
    "Seat",
    "SentEvent",
    "TakenRun",
    "Trace",
    "Trial",
    "_Claim",
    "_InFlight",
    "_UseWindow",
}
"""Mutable dataclasses: they hold the state of a process or of a pass."""


@pytest.fixture(scope="module")
def trees():
    """(path, tree) of every file of the rooms. They end with the tests of this file, since they take much memory."""
    return [(path, ast.parse(path.read_text())) for path in files().values()]


def test_a_dataclass_is_frozen_unless_it_is_known_state(trees):
    mutable = {
        node.name
        for _, tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for decorator in map(ast.unparse, node.decorator_list)
        if re.match(r"dataclass\b", decorator) and "frozen=True" not in decorator
    }
    assert mutable == STATE


def test_a_docstring_begins_and_ends_as_a_sentence(trees):
    wrong = [
        f"{path.relative_to(ROOT)}: {text.splitlines()[0]}"
        for path, tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if (text := ast.get_docstring(node))
        if not re.match(r"[A-Z0-9`'\"(\[]|vLLM", text) or text.split("\n\n")[0].rstrip()[-1] not in ".:;?!"
    ]
    assert wrong == []


def test_folders_of_tests_mirror_the_rooms():
    """`data` holds no tests."""
    tests = [(room, path) for room in ROOMS for path in (ROOT / "tests" / room).rglob("*.py")]
    mirrored = {ROOT / room / path.parent.relative_to(ROOT / "tests" / room) for room, path in tests}
    assert [folder for folder in mirrored if not folder.is_dir()] == []


def test_the_changelog_is_short():
    assert len((ROOT / "CHANGELOG.md").read_text().splitlines()) <= CHANGELOG_LINES


def test_the_headline_figures_fit_a_page():
    assert len((ROOT / "docs" / "internals" / "measured.md").read_text().splitlines()) <= 60


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule[0].strip()[:40])
def test_a_rule_names_tests_that_exist(rule):
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", rule[2])
    assert named
    assert [name for file, name in named if f"def {name}(" not in (ROOT / file).read_text()] == []


def test_the_files_that_a_change_touches_exist():
    paths = [path for path in re.findall(r"`([\w./]+/[\w./]+)`", PAGE) if "NAME" not in path]
    assert len(paths) > 30
    assert [path for path in paths if not (ROOT / path).exists()] == []
