"""Movie-review sentences rated by people (Hutto & Gilbert 2014), split into training and held-out sentences.

The sources of the package `vaderSentiment` contain 10,605 sentences, each with the mean of 20 ratings from -4 to 4. A
sentence is in a single split: held-out and training sentences are disjoint.
"""

from __future__ import annotations

import tarfile
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

RATINGS_ARCHIVE = "additional_resources/hutto_ICWSM_2014.tar.gz"
RATINGS_FILE = "movieReviewSnippets_GroundTruth.txt"
OPENING_WORDS = 5
HELD_OUT_TENTHS = 1


@dataclass(frozen=True, slots=True)
class Sentence:
    """A sentence and the mean of its ratings."""

    number: int
    rating: float
    text: str

    @property
    def split(self) -> str:
        """`train` or `held_out`, determined by the text alone: the same sentence is never in both."""
        digest = blake2b(self.text.lower().encode(), digest_size=8).digest()
        return "held_out" if int.from_bytes(digest, "little") % 10 < HELD_OUT_TENTHS else "train"

    @property
    def opening(self) -> str:
        """Its first words."""
        return " ".join(self.text.split()[:OPENING_WORDS])

    @property
    def rest(self) -> str:
        """The text after its opening, including the space between them."""
        return "".join(f" {word}" for word in self.text.split()[OPENING_WORDS:])


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


def _member(archive: tarfile.TarFile, ending: str) -> tarfile.TarInfo:
    return next(member for member in archive if member.name.endswith(ending))
