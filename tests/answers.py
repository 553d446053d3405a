"""The answers of docs/will_it_fit.md, and its notebook: `python -m tests.answers` asks all again and writes both.

`python -m tests.answers 3 5` asks the third and the fifth question alone.
"""

import json
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

PROJECT = Path(__file__).parents[1]
PAGE = PROJECT / "docs" / "will_it_fit.md"
NOTEBOOK = PROJECT / "docs" / "notebooks" / "will_it_fit.ipynb"
PROGRAM = Path(sys.executable).with_name("prefect-rlhf")
QUESTION = re.compile(r"^## (?P<title>[^\n]+)\n(?P<text>.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
BLOCKS = re.compile(r"```console\n\$ (?P<command>.*?)\n```\n\n```text\n(?P<answer>.*?)```\n", re.DOTALL)
FIRST_LINES = 3
LIMIT_SECONDS = 580


@dataclass(frozen=True, slots=True)
class Question:
    """A question of the page: its heading, the command that asks, and the first lines of the printed answer."""

    title: str
    command: str
    answer: str


def questions() -> list[Question]:
    """The questions of the page, in order."""
    found = []
    for section in QUESTION.finditer(PAGE.read_text()):
        found += [Question(section["title"], *blocks) for blocks in BLOCKS.findall(section["text"])]
    return found


def asked(command: str) -> str:
    """The first lines that the command prints, in an empty folder; of a refusal, its line."""
    with TemporaryDirectory() as folder:
        words = {"cwd": folder, "capture_output": True, "text": True, "timeout": LIMIT_SECONDS, "check": False}
        ended = subprocess.run([PROGRAM, *shlex.split(command)[1:]], **words)
    printed = ended.stdout.strip().splitlines()
    if ended.returncode:
        printed = [line for line in ended.stderr.splitlines() if line.startswith("prefect-rlhf: ")]
    return "".join(f"{line}\n" for line in printed[:FIRST_LINES])


def notebook() -> str:
    """The notebook that asks the same questions, with the answers of the page as its outputs."""
    start = "# Will it fit?\nThese cells need the planning install alone: no GPU, no weights, no torch."
    cells: list[dict[str, object]] = [_cell("markdown", start)]
    for number, question in enumerate(questions(), 1):
        cells.append(_cell("markdown", f"## {question.title}"))
        output = {"output_type": "stream", "name": "stdout", "text": question.answer.splitlines(keepends=True)}
        code = f"!{question.command} 2>&1 | grep -v WARNING | head -n {FIRST_LINES}"
        cells.append(_cell("code", code) | {"execution_count": number, "outputs": [output]})
    named = {"display_name": "Python 3", "language": "python", "name": "python3"}
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    whole = {"cells": cells, "metadata": {"kernelspec": named}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1) + "\n"


def _cell(kind: str, text: str) -> dict[str, object]:
    return {"cell_type": kind, "metadata": {}, "source": text.splitlines(keepends=True)}


def main(numbers: list[int]) -> None:
    """Ask these questions, or all, and write their answers into page and notebook."""
    for number, question in enumerate(questions(), 1):
        if numbers and number not in numbers:
            continue
        new = replace(question, answer=asked(question.command))
        blocks = [f"$ {one.command}\n```\n\n```text\n{one.answer}```\n" for one in (question, new)]
        PAGE.write_text(PAGE.read_text().replace(*blocks))
        print(f"{number}. {question.title}\n{new.answer}", flush=True)
    NOTEBOOK.parent.mkdir(exist_ok=True)
    NOTEBOOK.write_text(notebook())


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]])
