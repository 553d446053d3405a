"""Our side of `grpo_step.py`: the flow `rlhf/grpo` without a reference, its reward a Python function."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.beside_trl.grpo_work import REWARD, GRPOWork
from benchmarks.beside_trl.our_step import train


def flow_parameters(work: GRPOWork, folder: Path) -> dict[str, Any]:
    """Parameters of the flow: one step more than is measured; evaluation only before the first and after the last."""
    prompts = {"path": str(folder / "prompts.parquet")}
    texts = work.prompt_texts()
    rows = [(text, "train") for text in texts] + [(text, "held_out") for text in texts[: work.batch_size]]
    pq.write_table(pa.table(dict(zip(("prompt", "split"), zip(*rows, strict=True), strict=True))), prompts["path"])
    return {
        "prompts": prompts,
        "held_out": {**prompts, "split": "held_out"},
        "actor": {"path": work.model},
        "reward": {"functions": {"vowels": {"function": REWARD, "signature": "trl"}}},
        "output_dir": str(folder),
        "steps": work.steps + 1,
        "plan": work.plan,
        "algo": {
            "batch_size": work.batch_size,
            "samples_per_prompt": work.samples,
            "sampling": {"max_new_tokens": work.response_tokens, "stop_at_eos": False},
            "update": {"epochs": work.epochs, "mini_batches": work.mini_batches},
            "kl": {"coefficient": 0},
            "optimizer": {"lr": work.learning_rate},
            "evaluate_every": work.steps + 1,
        },
    }


if __name__ == "__main__":
    asked = GRPOWork(**json.loads(sys.argv[1]))
    train("grpo", asked, partial(flow_parameters, asked))
