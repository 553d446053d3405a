"""docs/architecture.md counts the lines that a person reads to change something, and the files have about as many."""

import re
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
PAGE = (PROJECT / "docs" / "architecture.md").read_text()
SLACK = 0.1
"""A count may be off by this share, or by `FEW` lines, so that a small change of a file needs no change of the page."""
FEW = 10
COUNTED = re.findall(r"\[`([\w/]+\.py)`\]\(\.\./\1\) \| (\d+) \|", PAGE)
LISTS = re.findall(r"^### ([^\n]+): (\d+) lines\n(.*?)(?=^##)", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(("file", "lines"), COUNTED)
def test_a_file_is_about_as_long_as_the_page_says(file, lines):
    length = len((PROJECT / file).read_text().splitlines())
    assert abs(length - int(lines)) <= max(FEW, SLACK * length), f"{file} has {length} lines, the page says {lines}"


@pytest.mark.parametrize(("title", "total", "table"), LISTS, ids=[title for title, _, _ in LISTS])
def test_a_list_names_the_sum_of_its_files(title, total, table):
    assert sum(int(lines) for _, lines in re.findall(r"\[`([\w/]+\.py)`\]\(\S+\) \| (\d+) \|", table)) == int(total)


def test_the_page_has_a_list_for_each_common_change():
    assert [title for title, _, _ in LISTS] == [
        "Change a loss",
        "Add a reward",
        "Add a model family",
        "Add an engine",
        "Add a word of a plan",
    ]


def test_folders_that_a_reader_may_skip_exist():
    folders = re.findall(r"`([\w/]+/)`", PAGE.partition("## What you can ignore")[2])
    assert folders and [folder for folder in folders if not (PROJECT / folder).is_dir()] == []
