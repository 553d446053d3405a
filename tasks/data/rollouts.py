"""Rollouts as Parquet files that can be read while the run goes on: one per step, written then renamed.

Columns: prompt, response (text), tokens (prompt and response), logprobs, advantages (per response token), reward (the
reward model's score), step, weight_version (of the actor), row_id (number in the dataset's split).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from prefect_rlhf.engines.compute import Computed, Context
from prefect_rlhf.engines.rows import Batch
from prefect_rlhf.placement.atomic_file import write_atomically
from prefect_rlhf.tasks.data.tokenizer import load_tokenizer
from prefect_rlhf.tasks.operations import computation
from prefect_rlhf.tasks.settings import Settings

ROLLOUTS = "rollouts"  # folder in the run's directory


@computation()
def record_rollouts(rollout: Batch, scores: Batch, advantages: Batch, settings: Settings, context: Context) -> Computed:
    """Write `rollouts/step-000003.parquet`: this step's responses with their rewards and advantages."""
    columns = text_columns(rollout, context.tokenizer) | {
        "tokens": lists(rollout, "tokens"),
        "logprobs": lists(rollout, "logprobs"),
        "reward": scores["scores"].float().tolist(),
        "advantages": lists(advantages, "advantages"),
    }
    write_rows(columns, ROLLOUTS, context)
    return Computed()


def lists(batch: Batch, key: str) -> list[list[Any]]:
    """Return the rows of a column, each as long as it is."""
    return [row.tolist() for row in batch.columns[key]]


def text_columns(rollout: Batch, tokenizer: str) -> dict[str, list[str]]:
    """Return prompts and responses as text, without special tokens."""
    decode = load_tokenizer(tokenizer).batch_decode
    tokens, lengths = lists(rollout, "tokens"), [int(length) for length in rollout.columns["prompt_length"]]
    prompts = [row[:length] for row, length in zip(tokens, lengths, strict=True)]
    responses = [row[length:] for row, length in zip(tokens, lengths, strict=True)]
    return {
        "prompt": decode(prompts, skip_special_tokens=True),
        "response": decode(responses, skip_special_tokens=True),
    }


def write_rows(columns: Mapping[str, Sequence[Any]], folder: str, context: Context) -> Path:
    """Write a step's rows into `folder` of the run's directory; a reader never sees half a file."""
    path = context.run_dir / folder / f"step-{context.step:06d}.parquet"
    num_rows = len(context.row_ids)
    origins = {
        "step": [context.step] * num_rows,
        "weight_version": [context.versions.get("actor", 0)] * num_rows,
        "row_id": list(context.row_ids),
    }
    return write_atomically(path, lambda part: pq.write_table(pa.table({**columns, **origins}), part))
