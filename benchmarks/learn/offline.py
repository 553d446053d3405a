"""What `benchmarks.learn` runs and reads for algorithms that learn from stored rows: sft and dpo.

SFT learns the sums of `sums.py` as chats, and is judged by the loss on held-out answers. DPO learns which of two
sentences people rated better, and is judged by the pairs of held-out sentences that it prefers the right way.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.demo.outcome import read_metrics
from benchmarks.demo.ratings import prepare_ratings
from benchmarks.learn import sums

GOALS = {"sft": -0.3, "dpo": 0.1}
"""By how much the metric shall change."""
STEPS = {"sft": 30, "dpo": 40}
METRICS = {"sft": "token_loss.loss", "dpo": "preference_accuracy.accuracy"}
NAMES = {
    "sft": "loss on the answers of held-out sums, nats a token",
    "dpo": "held-out pairs preferred the right way, a tie a half",
}
ALGO: Mapping[str, Mapping[str, Any]] = {
    "sft": {"batch_size": 16, "optimizer": {"lr": 2e-5, "warmup_steps": 3}},
    "dpo": {"batch_size": 16, "optimizer": {"lr": 2e-5, "warmup_steps": 5}},
}


def prepare(home: Path, name: str) -> None:
    """Write the data of an algorithm unless they are there."""
    if name == "sft":
        write_answered_sums(home / "data" / "answered_sums.parquet")
    else:
        prepare_ratings(home / "data", home / "downloads")


def write_answered_sums(file: Path) -> Path:
    """Write all questions of `sums.py` with their answers, as Parquet: `messages` and `split`."""
    table = pq.read_table(sums.write_sums(file.with_name("sums.parquet"))).to_pylist()
    chats = [[*row["prompt"], {"role": "assistant", "content": f"The answer is {row['answer']}."}] for row in table]
    pq.write_table(pa.table({"messages": chats, "split": [row["split"] for row in table]}), file)
    return file


def parameters(home: Path, name: str, seed: int, steps: int) -> dict[str, Any]:
    """Return the flow's parameters."""
    model = {"path": str(home / "models" / "smollm2")}
    rows, file = ("chats", "answered_sums.parquet") if name == "sft" else ("pairs", "preferences.parquet")
    path = {"path": str(home / "data" / file)}
    return {
        rows: path,
        "held_out": {**path, "split": "held_out"},
        "actor": model,
        **({"ref": model} if name == "dpo" else {}),
        "steps": steps,
        "seed": seed,
        "algo": {"evaluate_every": 10, **ALGO[name]},
        "output_dir": str(home / "runs" / f"learn_{name}"),
    }


def summary(run_dir: Path, name: str, seed: int, minutes: float) -> dict[str, Any]:
    """Return what the benchmark prints."""
    found = read_metrics(run_dir, "evaluation.jsonl")
    by_step = {int(each["step"]): round(each[METRICS[name]], 3) for each in found}
    margins = (
        {int(each["step"]): round(each["preference_accuracy.margin"], 3) for each in found} if name == "dpo" else {}
    )
    return {
        "algorithm": name,
        "metric": NAMES[name],
        "before": by_step[min(by_step)],
        "after": by_step[max(by_step)],
        "goal": GOALS[name],
        "minutes": round(minutes, 1),
        "seed": seed,
        "by_step": by_step,
        **({"margin_by_step": margins} if margins else {}),
    }
