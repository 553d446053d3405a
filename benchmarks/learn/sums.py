"""A task whose answers can be checked: sums of two digits, asked in several ways.

No held-out sum is trained on, not even with its terms in the other order.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

WAYS = ("What is {a} + {b}?", "How much is {a} plus {b}?", "What is the sum of {a} and {b}?", "{a} + {b} = ?")
HELD_OUT_SUMS = 14  # of the 55 of two digits, whatever their order
_NUMBER = re.compile(r"\d+")


def write_sums(file: Path, seed: int = 0) -> Path:
    """Write all questions as a Parquet file: `prompt` (a chat), `answer` and `split`."""
    sums = [(a, b) for a in range(10) for b in range(a, 10)]
    held_out = set(random.Random(seed).sample(sums, HELD_OUT_SUMS))
    asked = [(a, b, way) for first, second in sums for a, b in {(first, second), (second, first)} for way in WAYS]
    columns = {
        "prompt": [[{"role": "user", "content": way.format(a=a, b=b)}] for a, b, way in asked],
        "answer": [a + b for a, b, _ in asked],
        "split": ["held_out" if (min(a, b), max(a, b)) in held_out else "train" for a, b, _ in asked],
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), file)
    return file


def exact(row: Mapping[str, Any]) -> float:
    """Return 1 if the last number of the response's first line is the answer.

    >>> exact({"response": "7 + 5 = 12.\\nSo it is 12 or 13", "answer": 12}), exact({"response": "Many", "answer": 12})
    (1.0, 0.0)
    """
    numbers = _NUMBER.findall(row["response"].strip().partition("\n")[0])
    return float(bool(numbers) and int(numbers[-1]) == row["answer"])
