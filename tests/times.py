"""python -m tests.times REPORT: the times of a run of the tests by file, and its slowest twenty, as tables of Markdown.

REPORT is what `pytest --junitxml=REPORT` writes.
"""

import sys
import xml.etree.ElementTree as ET
from collections import defaultdict
from pathlib import Path

SHORT_SECONDS = 10.0
"""Files below this are summed up in one row."""


def read(report: Path) -> list[tuple[str, str, float]]:
    """(file, test, seconds with setup and teardown) of each test."""
    cases = ET.parse(report).iter("testcase")
    return [(file_of(case.get("classname", "")), case.get("name", ""), float(case.get("time", 0))) for case in cases]


def file_of(module: str) -> str:
    """
    >>> file_of("tests.flows.test_run")
    'flows/test_run.py'
    """
    return module.removeprefix("tests.").replace(".", "/") + ".py"


def tables(cases: list[tuple[str, str, float]]) -> str:
    """Both tables."""
    by_file: dict[str, list[float]] = defaultdict(list)
    for file, _, seconds in cases:
        by_file[file if sum(s for f, _, s in cases if f == file) >= SHORT_SECONDS else "others"].append(seconds)
    rows = sorted(by_file.items(), key=lambda row: -sum(row[1]))
    total = sum(seconds for *_, seconds in cases)
    lines = ["| file | tests | seconds |", "|---|---|---|"]
    lines += [f"| {file} | {len(of_file)} | {sum(of_file):.0f} |" for file, of_file in rows]
    lines += [f"| all | {len(cases)} | {total:.0f} |", "", "| test | seconds |", "|---|---|"]
    slowest = sorted(cases, key=lambda case: -case[2])[:20]
    return "\n".join(lines + [f"| {file}::{name} | {seconds:.0f} |" for file, name, seconds in slowest])


if __name__ == "__main__":
    print(tables(read(Path(sys.argv[1]))))  # noqa: T201  a command
