"""Human ratings of movie-review sentences (Hutto & Gilbert 2014) as prompts, preference pairs and rated answers.

The sources of the package `vaderSentiment` hold 10,605 sentences, each with the mean of 20 ratings from -4 to 4.
A sentence is in one split only: what is held out shares no sentence, and no opening, with what is trained on.
"""

from __future__ import annotations

import random
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from prefect_rlhf.flows.demo.packages import download
from prefect_rlhf.placement.atomic_file import write_atomically

PACKAGE = "vaderSentiment==3.3.2"
RATINGS_ARCHIVE = "additional_resources/hutto_ICWSM_2014.tar.gz"
RATINGS_FILE = "movieReviewSnippets_GroundTruth.txt"

OPENING_WORDS = 5
MIN_WORDS = 9  # of a sentence whose opening is a prompt: the rest is worth writing
MIN_MARGIN = 0.5  # between the ratings of a pair
MIN_RATING = 1.0  # of an answer that is good; a bad one is as far below 0
NUM_HELD_OUT = {"prompts": 64, "preferences": 200, "answers": 200}  # all are used in every evaluation
HELD_OUT_TENTHS = 1


@dataclass(frozen=True, slots=True)
class Sentence:
    """A sentence and the mean of its ratings."""

    number: int
    rating: float
    text: str

    @property
    def split(self) -> str:
        """`train` or `held_out`, by the text alone: the same sentence is never in both."""
        digest = blake2b(self.text.lower().encode(), digest_size=8).digest()
        return "held_out" if int.from_bytes(digest, "little") % 10 < HELD_OUT_TENTHS else "train"

    @property
    def opening(self) -> str:
        """Its first words."""
        return " ".join(self.text.split()[:OPENING_WORDS])

    @property
    def rest(self) -> str:
        """What follows its opening, with the space between."""
        return "".join(f" {word}" for word in self.text.split()[OPENING_WORDS:])


def prepare_ratings(out: Path, downloads: Path) -> tuple[Path, Path, Path]:
    """Write Parquet of prompts, preferences and answers into `out` unless they are there; return their paths."""
    paths = out / "prompts.parquet", out / "preferences.parquet", out / "answers.parquet"
    if all(path.is_file() for path in paths):
        return paths
    sentences = read_sentences(download(PACKAGE, downloads, source=True))
    for path, rows_of in zip(paths, (prompt_rows, preference_rows, answer_rows), strict=True):
        write_atomically(path, partial(pq.write_table, pa.Table.from_pylist(rows_of(sentences))))
    return paths


def read_sentences(sources: Path) -> list[Sentence]:
    """Read the rated sentences in the package's sources: an archive within an archive, tab-separated."""
    with tarfile.open(sources) as package:
        inner = package.extractfile(_member(package, RATINGS_ARCHIVE))
        with tarfile.open(fileobj=inner) as ratings:
            file = ratings.extractfile(_member(ratings, RATINGS_FILE))
            assert file is not None  # a regular file, by its name
            lines = file.read().decode("utf-8", errors="replace").splitlines()
    fields = (line.split("\t", 2) for line in lines if line.strip())
    return [Sentence(int(number), float(rating), " ".join(text.split())) for number, rating, text in fields]


def prompt_rows(sentences: Sequence[Sentence]) -> list[dict[str, Any]]:
    """Return openings, each once, those of training first: prompt, prompt_id (number of the sentence), split."""
    openings: dict[str, Sentence] = {}
    for sentence in sorted(_shuffled(sentences), key=lambda sentence: sentence.split == "held_out"):
        if len(sentence.text.split()) >= MIN_WORDS:
            openings.setdefault(sentence.opening, sentence)
    rows = [{"prompt": o, "prompt_id": s.number, "split": s.split} for o, s in openings.items()]
    return _limit_held_out(rows, NUM_HELD_OUT["prompts"])


def preference_rows(sentences: Sequence[Sentence]) -> list[dict[str, Any]]:
    """Return pairs, each sentence in one at most: prompt (empty), chosen, rejected, margin, split."""
    rows = [row for split in ("train", "held_out") for row in _pairs([s for s in sentences if s.split == split])]
    return _limit_held_out(rows, NUM_HELD_OUT["preferences"])


def answer_rows(sentences: Sequence[Sentence]) -> list[dict[str, Any]]:
    """Return openings with what follows, each good or bad by itself: prompt, completion, label, split."""
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


def _member(archive: tarfile.TarFile, ending: str) -> tarfile.TarInfo:
    return next(member for member in archive if member.name.endswith(ending))
