"""Every answer of docs/will_it_fit.md is what its command prints today, on any machine."""

import json
import re
import subprocess

import pytest

from tests.answers import FIRST_LINES, NOTEBOOK, PAGE, PROGRAM, asked, notebook, questions

QUICK = ("And on a card with 96 GB?",)
"""The question that `make test` asks."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "question",
    [
        pytest.param(question, id=question.title, marks=[] if question.title in QUICK else [pytest.mark.all])
        for question in questions()
    ],
)
def test_each_question_gets_the_pages_answer(question):
    """`python -m tests.answers` writes answers anew after an intended change."""
    assert asked(question.command) == question.answer


def test_the_page_answers_fifteen_questions_and_each_has_an_answer():
    found = questions()
    assert len(found) >= 15 and len({question.command for question in found}) == len(found)
    assert {*QUICK} <= {question.title for question in found}
    for question in found:
        assert re.match(r"fits: |prefect-rlhf: [\w. ]+: got ", question.answer), question.title
        assert "```" not in question.answer and len(question.answer.splitlines()) <= FIRST_LINES


def test_the_notebook_asks_the_questions_of_the_page_and_shows_their_answers():
    assert NOTEBOOK.read_text() == notebook()
    assert f"({NOTEBOOK.relative_to(PAGE.parent)})" in PAGE.read_text()


@pytest.mark.slow
@pytest.mark.all
def test_the_notebooks_cells_print_what_they_show(tmp_path):
    """The shortest question, as the cell passes it to a shell."""
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    (cell,) = [cell for cell in cells if "trl" not in cell["source"][0] and "plan dpo" in cell["source"][0]]
    command = cell["source"][0].removeprefix("!").replace("prefect-rlhf", str(PROGRAM), 1)
    printed = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=580)
    assert printed.stdout == "".join(cell["outputs"][0]["text"])
