"""docs/internals/testing.md names a test for each promise of the README, and `make test` runs each of them."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.house import ROOMS

TESTS = Path(__file__).parents[1]
PROJECT = TESTS.parent
MARK = "pytest.mark."
FEWEST_FILES = {"files": 2, "errors": 1}
"""Files with quick tests in a ground room; every other room has at least 3."""


def section(page, heading):
    """The lines below a heading, up to the next one."""
    text = (PROJECT / page).read_text().partition(f"\n## {heading}\n")[2]
    return text.partition("\n## ")[0].splitlines()


def promises():
    """The promises of the README, in its words."""
    return [line.split("**")[1] for line in section("README.md", "What it promises") if line.startswith("- **")]


def table():
    """Each promise with its tests."""
    lines = section("docs/internals/testing.md", "Which test keeps which promise")
    rows = [line.strip("|").split(" | ") for line in lines if line.startswith("| ")]
    return [tuple(cell.strip() for cell in row) for row in rows][1:]


def named_tests():
    """(promise, node ID) of each test in the table."""
    return [(promise, test) for promise, tests in table() for test in re.findall(r"`(\S+::\w+)`", tests)]


@cache
def marks_of(path):
    """The marks of each test of a file, those of the file included. Marks of single parameters do not count."""
    tree = ast.parse(path.read_text())
    of_file = [
        ast.unparse(statement.value)
        for statement in tree.body
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "pytestmark"
    ]
    functions = [statement for statement in tree.body if isinstance(statement, ast.FunctionDef)]
    return {function.name: [*map(ast.unparse, function.decorator_list), *of_file] for function in functions}


@pytest.mark.parametrize(("promise", "test"), named_tests())
def test_a_promise_is_kept_by_a_test_that_exists_and_that_make_test_runs(promise, test):
    file, _, name = test.partition("::")
    marks = marks_of(PROJECT / file)[name]
    assert not any(mark == f"{MARK}all" or mark.startswith("[") and f"{MARK}all" in mark for mark in marks), promise


def test_every_promise_of_the_readme_has_a_row():
    assert promises() == [promise for promise, _ in table()]
    assert promises() and {promise for promise, _ in named_tests()} == {*promises()}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_has_quick_tests(room):
    """Files with quick tests have no slow or long test, so that `pytest -m quick` needs no other expression."""
    texts = [path.read_text() for path in (TESTS / room).rglob("test_*.py")]
    quick = [text for text in texts if f"{MARK}quick" in text]
    assert len(quick) >= FEWEST_FILES.get(room, 3)
    assert not [text for text in quick if f"{MARK}slow" in text or f"{MARK}all" in text]


ABOUT_GPUS = re.compile(r"\b(GPUs?|CUDA|NCCL|[AHV][12]00)\b")
STATED = re.compile(
    r"\(gpu\.md|docs/gpu\.md|not yet run|no gpu has|no run on gpus|without a gpu|not run on a gpu", re.IGNORECASE
)
"""A link to the page about GPUs, or what it says."""


def pages_about_gpus():
    """Each page that mentions GPUs outside of its examples, with its text. Decisions are records under one page."""
    for page in [PROJECT / "README.md", *sorted((PROJECT / "docs").glob("*.md"))]:
        text = page.read_text()
        if ABOUT_GPUS.search(re.sub(r"```.*?```", "", text, flags=re.DOTALL)) or page.stem == "decisions":
            yield pytest.param(text, id=page.name)


@pytest.mark.parametrize("text", list(pages_about_gpus()))
def test_a_page_about_gpus_states_whether_it_was_run_on_them(text):
    assert STATED.search(text), "state `not yet run`, `no GPU has ...`, or link to docs/gpu.md"
