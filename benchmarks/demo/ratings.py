"""Rated sentences as prompts, preference pairs, rated answers and pairs of a cost.

Held-out rows share no sentence, and no opening, with training rows.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.demo.costs import cost_rows
from benchmarks.demo.packages import download
from benchmarks.demo.sentences import Sentence, read_sentences
from prefect_rlhf.files.atomic_file import write_atomically

PACKAGE = "vaderSentiment==3.3.2"

MIN_WORDS = 9  # of a sentence whose opening becomes a prompt, so that enough text follows
MIN_MARGIN = 0.5  # difference between the ratings of a pair
MIN_RATING = 1.0  # of a good answer; a bad answer is at most minus this
NUM_HELD_OUT = {"prompts": 64, "preferences": 200, "answers": 200}  # every evaluation uses all of them


def prepare_ratings(out: Path, downloads: Path) -> tuple[Path, ...]:
    """Write Parquet of prompts, preferences, answers and costs into `out` unless they exist; return their paths."""
    rows_of = {"prompts": prompt_rows, "preferences": preference_rows, "answers": answer_rows, "costs": cost_rows}
    paths = tuple(out / f"{name}.parquet" for name in rows_of)
    if all(path.is_file() for path in paths):
        return paths
    sentences = read_sentences(download(PACKAGE, downloads, source=True))
    for path, rows in zip(paths, rows_of.values(), strict=True):
        write_atomically(path, partial(pq.write_table, pa.Table.from_pylist(rows(sentences))))
    return paths


def prompt_rows(sentences: Sequence[Sentence]) -> list[dict[str, Any]]:
    """Return distinct openings, training rows first: prompt, prompt_id (number of the sentence), split."""
    openings: dict[str, Sentence] = {}
    for sentence in sorted(_shuffled(sentences), key=lambda sentence: sentence.split == "held_out"):
        if len(sentence.text.split()) >= MIN_WORDS:
            openings.setdefault(sentence.opening, sentence)
    rows = [{"prompt": o, "prompt_id": s.number, "split": s.split} for o, s in openings.items()]
    return _limit_held_out(rows, NUM_HELD_OUT["prompts"])


def preference_rows(sentences: Sequence[Sentence]) -> list[dict[str, Any]]:
    """Return pairs, with each sentence at most once: prompt (empty), chosen, rejected, margin, split."""
    rows = [row for split in ("train", "held_out") for row in _pairs([s for s in sentences if s.split == split])]
    return _limit_held_out(rows, NUM_HELD_OUT["preferences"])


def answer_rows(sentences: Sequence[Sentence]) -> list[dict[str, Any]]:
    """Return openings with their continuations, each rated good or bad: prompt, completion, label, split."""
    rows = [
        {"prompt": s.opening, "completion": s.rest, "label": s.rating > 0, "split": s.split}
        for s in _shuffled(list({sentence.text: sentence for sentence in sentences}.values()))
        if abs(s.rating) >= MIN_RATING and len(s.text.split()) >= MIN_WORDS
    ]
    return _limit_held_out(rows, NUM_HELD_OUT["answers"])


def _pairs(sentences: Sequence[Sentence]) -> Iterator[dict[str, Any]]:
    shuffled = _shuffled(list({sentence.text: sentence for sentence in sentences}.values()))
    for pair in zip(shuffled[0::2], shuffled[1::2], strict=False):
        better, worse = sorted(pair, key=lambda sentence: -sentence.rating)
        margin = better.rating - worse.rating
        if margin >= MIN_MARGIN:
            yield {"prompt": "", "chosen": better.text, "rejected": worse.text, "margin": margin, "split": better.split}


def _shuffled(sentences: Sequence[Sentence]) -> list[Sentence]:
    return random.Random("order of the ratings").sample(sentences, len(sentences))


def _limit_held_out(rows: Sequence[Mapping[str, Any]], number: int) -> list[dict[str, Any]]:
    held_out = [dict(row) for row in rows if row["split"] == "held_out"]
    return [dict(row) for row in rows if row["split"] == "train"] + held_out[:number]
