"""A cost defined by a rule, as preference pairs for a cost model: overstatement, recognised by its words."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

from benchmarks.demo.sentences import Sentence

OVERSTATEMENTS = (
    "absolutely always best completely entirely ever every extremely finest funniest greatest incredibly masterpiece"
    " most never perfect perfectly totally truly utterly worst"
)
_OVERSTATED = re.compile(rf"\b({'|'.join(OVERSTATEMENTS.split())})\b", re.IGNORECASE)
NUM_HELD_OUT = 200


def overstatements(text: str) -> int:
    """Count the words that overstate.

    >>> overstatements("The best film ever made."), overstatements("A good film.")
    (2, 0)
    """
    return len(_OVERSTATED.findall(text))


def cost_rows(sentences: Sequence[Sentence]) -> list[dict[str, Any]]:
    """Return pairs of a sentence that overstates, as `chosen`, and another sentence; also prompt (empty) and split.

    A model trained on them scores the cost of a response. Each sentence is in at most a single pair.
    """
    rows: list[dict[str, Any]] = []
    for split in ("train", "held_out"):
        texts = sorted({sentence.text for sentence in sentences if sentence.split == split})
        random.Random("order of the costs").shuffle(texts)
        costly, plain = (
            [text for text in texts if bool(overstatements(text)) == is_costly] for is_costly in (True, False)
        )
        pairs = list(zip(costly, plain, strict=False))[: NUM_HELD_OUT if split == "held_out" else None]
        rows += [{"prompt": "", "chosen": more, "rejected": less, "split": split} for more, less in pairs]
    return rows
