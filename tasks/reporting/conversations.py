"""An evaluation's whole conversations as Markdown: the model's turns, with answers in quotes."""

import re
from collections.abc import Mapping
from math import isnan
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from prefect_rlhf.tasks.data.conversation import ASSISTANT, ENVIRONMENT, FAILED, PROMPT
from prefect_rlhf.tasks.data.rollouts import EVALUATION, step_files

CONVERSATIONS_SHOWN = 3
LONGEST_MESSAGE = 20_000  # characters, since a server refuses artifacts without limits
HEADINGS = {PROMPT: "Prompt", ENVIRONMENT: "Environment", FAILED: "Failed play"}


def newest_evaluation(run_dir: Path) -> Path | None:
    """Return the file of a run's newest evaluation, if its rows are conversations."""
    files = step_files(run_dir, EVALUATION)
    return files[-1] if files and "messages" in pq.read_schema(files[-1]).names else None


def conversations_markdown(evaluation: Path, number: int = CONVERSATIONS_SHOWN) -> str:
    """Return the first conversations of an evaluation."""
    rows = pq.read_table(evaluation).slice(0, number).to_pylist()
    file = f"{evaluation.parent.name}/{evaluation.name}"
    intro = f"The first {len(rows)} conversations of {file}. Quotes are answers of the environment."
    return "\n\n".join([intro, *(conversation_markdown(row) for row in rows)])


def conversation_markdown(row: Mapping[str, Any]) -> str:
    """Return a row's conversation under a heading with its number, score and number of turns."""
    reward = row["reward"]
    score = "no score" if reward is None or isnan(reward) else f"score {reward:.4g}"
    parts = [f"## Row {row['row_id']} · {score} · {row['turns']} turns"]
    turn = 0
    for message in row["messages"]:
        role, heading = message["role"], HEADINGS.get(message["role"], "")
        if role == ASSISTANT:
            heading, turn = f"Model, turn {turn} · reward {row['turn_rewards'][turn]:.4g}", turn + 1
        part = f"**{heading}**\n\n{fenced(message['content'])}"
        parts.append(part if role != ENVIRONMENT else quoted(part))
    return "\n\n".join(parts)


def fenced(text: str, most: int = LONGEST_MESSAGE) -> str:
    """Return a text, cut to `most` characters, in a fence that is longer than any fence in the text.

    In a fence no text is read as Markdown, such as a link, a picture or HTML.
    """
    left_out = len(text) - most
    if left_out > 0:
        text = f"{text[:most]}\n[{left_out:,} further characters]"
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}text\n{text}\n{fence}"


def quoted(text: str) -> str:
    """Return a Markdown text as a quote."""
    return "\n".join(f"> {line}".rstrip() for line in text.split("\n"))
