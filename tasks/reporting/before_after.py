"""Responses before and after training to the same held-out prompts, for a first look at a run."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq

from prefect_rlhf.tasks.data.rollouts import EVALUATION, step_files

PROMPTS_SHOWN = 3
LONGEST_TEXT = 88  # characters, so that a line has at most a hundred


def before_and_after(run_dir: Path, number: int = PROMPTS_SHOWN) -> list[tuple[str, str, str]]:
    """Return (prompt, response before, response after) of the first prompts of a run's evaluations.

    "Before" is the run's first evaluation, "after" its last. Returns an empty list for fewer than two evaluations, or
    without texts.
    """
    files = step_files(run_dir, EVALUATION)
    if len(files) < 2 or not all({"prompt", "response"} <= set(pq.read_schema(file).names) for file in files):
        return []
    first, last = (pq.read_table(file, columns=["prompt", "response"]).to_pylist() for file in (files[0], files[-1]))
    after = {row["prompt"]: row["response"] for row in reversed(last)}
    return [(row["prompt"], row["response"], after[row["prompt"]]) for row in first if row["prompt"] in after][:number]


def before_after_lines(run_dir: Path) -> Iterator[str]:
    """Yield the lines that show these responses, each within a line of a terminal; no line without evaluations."""
    shown = before_and_after(run_dir)
    if shown:
        yield f"responses to {len(shown)} held-out prompts, before and after training:"
    for prompt, before, after in shown:
        yield f"  {on_one_line(prompt)}"
        yield f"    before: {on_one_line(before)}"
        yield f"    after:  {on_one_line(after)}"


def on_one_line(text: str) -> str:
    r"""Return a text with its spaces and line breaks as single spaces, cut to the width of a terminal.

    >>> on_one_line(" 12.\n\nThis  is")
    '12. This is'
    """
    words = " ".join(text.split()) or "(empty)"
    return words if len(words) <= LONGEST_TEXT else f"{words[: LONGEST_TEXT - 1]}…"
