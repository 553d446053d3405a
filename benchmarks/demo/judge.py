"""An independent judge that needs no training: VADER (Hutto & Gilbert 2014), a lexicon and rules, from its sources."""

from __future__ import annotations

import importlib.util
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, final

from benchmarks.demo.packages import download
from benchmarks.demo.ratings import PACKAGE

FILES = ("vaderSentiment.py", "vader_lexicon.txt", "emoji_utf8_lexicon.txt")


@final
class Judge:
    """Rates how positive a text is, from -1 to 1 (VADER's `compound`).

    Its three files are downloaded to `folder` unless they exist.
    """

    def __init__(self, folder: Path, downloads: Path) -> None:
        if not all((folder / name).is_file() for name in FILES):
            _extract(download(PACKAGE, downloads, source=True), folder)
        self._analyzer = _load(folder / FILES[0]).SentimentIntensityAnalyzer()

    def compound(self, texts: Iterable[str]) -> list[float]:
        """Return a number per text."""
        return [self._analyzer.polarity_scores(text)["compound"] for text in texts]

    def pair_accuracy(self, pairs: Sequence[Mapping[str, str]]) -> float:
        """Return the share of pairs (`chosen`, `rejected`) whose chosen text is more positive; a tie counts half."""
        chosen = self.compound(pair["chosen"] for pair in pairs)
        rejected = self.compound(pair["rejected"] for pair in pairs)
        wins = [1.0 if c > r else 0.5 if c == r else 0.0 for c, r in zip(chosen, rejected, strict=True)]
        return sum(wins) / len(wins)


def _extract(sources: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(sources) as archive:
        for member in archive:
            path = Path(member.name)
            if path.name in FILES and path.parent.name == "vaderSentiment":
                file = archive.extractfile(member)
                assert file is not None  # a regular file, by its name
                (folder / path.name).write_bytes(file.read())


def _load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("vader_of_the_demo", path)
    assert spec is not None and spec.loader is not None  # a path that ends in .py has both
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
