"""docs/architecture.md counts the lines that a person reads to change something, and the files have about as many.

`python -m tests.house` counts them again.
"""

import re

import pytest

from tests.house import COUNTED, LISTED, READING, ROOT, length, recounted

PAGE = READING.read_text()
SLACK = 0.1
"""A count may be off by this share, or by `FEW` lines, so that a small change of a file needs no change of the page."""
FEW = 10
LISTS = LISTED.findall(PAGE)


@pytest.mark.parametrize(("file", "lines"), [(file, int(lines)) for _, file, lines in COUNTED.findall(PAGE)])
def test_a_file_is_about_as_long_as_the_page_says(file, lines):
    found = length(file)
    assert abs(found - lines) <= max(FEW, SLACK * found), f"{file} has {found} lines, the page says {lines}"


@pytest.mark.parametrize(("title", "total", "table"), LISTS, ids=[title for title, _, _ in LISTS])
def test_a_list_names_the_sum_of_its_files(title, total, table):
    assert sum(int(lines) for *_, lines in COUNTED.findall(table)) == int(total)


def test_the_page_has_a_list_for_each_common_change():
    assert [title.removeprefix("### ").removesuffix(": ") for title, _, _ in LISTS] == [
        "Change a loss",
        "Add a reward",
        "Add a model family",
        "Add an engine",
        "Add a word of a plan",
    ]


def test_counting_again_changes_only_numbers():
    wrong = COUNTED.sub(r"\g<1>1", PAGE)
    assert wrong != PAGE and recounted(wrong) == recounted(PAGE)
    assert re.sub(r"\d+", "", recounted(PAGE)) == re.sub(r"\d+", "", PAGE)


def test_folders_that_a_reader_may_skip_exist():
    folders = re.findall(r"`([\w/]+/)`", PAGE.partition("## What you can ignore")[2])
    assert folders and [folder for folder in folders if not (ROOT / folder).is_dir()] == []
