"""Rows per second of the check that precedes a run, beside transformers' own call on each row, on the same rows.

    python -m benchmarks.parts.check_rows --rows 200000 --model first/models/smollm2

Prompts of 9 to 44 words, as text and as chats. The anchor renders and tokenises a row at a time, as a plain loop over
`apply_chat_template` does; it keeps nothing and checks nothing. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from prefect_rlhf.tasks.data.datasets import PromptDataset
from prefect_rlhf.tasks.data.tokenizer import load_tokenizer

WORDS = ["film", "good", "bad", "story", "actor", "scene", "music", "light", "dark", "long", "short", "plot", "end"]


def main() -> None:
    """Check the same prompts as text and as chats; print rows per second."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--model", required=True, help="a folder with a tokenizer and a chat template")
    asked = parser.parse_args()
    texts = make_texts(asked.rows)
    found: dict[str, object] = {"rows": asked.rows}
    with tempfile.TemporaryDirectory() as folder:
        for form, values in (("text", texts), ("chat", [[{"role": "user", "content": text}] for text in texts])):
            path = str(Path(folder) / f"{form}.parquet")
            pq.write_table(pa.table({"prompt": values}), path)
            ours, anchor = (
                check_seconds(path, asked.model),
                plain_seconds(values[: len(values) // 10], asked.model) * 10,
            )
            print(f"{form}: {asked.rows / ours:,.0f} rows/s checked, {asked.rows / anchor:,.0f} rows/s in a plain loop")
            found |= {f"{form}_rows_per_second": round(asked.rows / ours), f"{form}_ratio": round(anchor / ours, 2)}
    print(json.dumps(found))


def make_texts(count: int) -> list[str]:
    """Return random sentences, the same each time."""
    draw = random.Random(0)
    return [f"What is said of {' '.join(draw.choices(WORDS, k=draw.randint(5, 40)))}?" for _ in range(count)]


def check_seconds(path: str, model: str) -> float:
    """Return the time of a check of all rows, reading them included."""
    source = PromptDataset("prompts", path, model, split_column=None)
    load_tokenizer(model)
    begin = time.perf_counter()
    source.check(max_tokens=1 << 20)
    return time.perf_counter() - begin


def plain_seconds(values: list[object], model: str) -> float:
    """Return the time of transformers' call on each of some prompts."""
    tokenizer = load_tokenizer(model)
    begin = time.perf_counter()
    for value in values:
        if isinstance(value, str):
            tokenizer(value)
        else:
            tokenizer.apply_chat_template(value, add_generation_prompt=True)
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
