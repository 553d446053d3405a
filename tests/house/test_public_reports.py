"""docs/internals/public_reports.md names tests and cases that exist, and for each report where it is."""

import ast
import re
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
PAGE = (PROJECT / "docs/internals/public_reports.md").read_text()
ROWS = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in PAGE.splitlines() if line.startswith("| [")]


@pytest.mark.parametrize(("file", "test"), sorted(set(re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", PAGE))))
def test_a_named_test_exists(file, test):
    tree = ast.parse((PROJECT / file).read_text())
    assert not test or test in {each.name for each in tree.body if isinstance(each, ast.FunctionDef)}


def test_a_named_case_of_the_computed_steps_exists():
    texts = [(PROJECT / f"tests/flows/test_recomputed_{of}.py").read_text() for of in ("steps", "ppo")]
    lines = [line for text in texts for line in text.splitlines() if line.startswith(('    "', "SCORED_BY"))]
    cases = set(re.findall(r'"(\w+)"', " ".join(lines)))
    assert {name for row in ROWS for name in re.findall(r"`(\w+)`", row[3])} <= cases


def test_every_report_has_a_link_and_what_happened():
    assert len(ROWS) >= 25
    for reports, there, here, *_ in ROWS:
        assert re.fullmatch(
            r"(\[[\w.-]+#\d+\]\(https://github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+\)(, )?)+", reports
        )
        assert there and here
