"""What the policy said, as Parquet files that can be read while the run goes on: one per step, written then renamed.

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
from prefect_rlhf.tasks.data.tokenizer import load_tokenizer
from prefect_rlhf.tasks.operations import computation
from prefect_rlhf.tasks.settings import Settings

ROLLOUTS, EVALUATION = "rollouts", "evaluation"  # folders in the run's directory


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


@computation()
def record_evaluation(rollout: Batch, scores: Batch, settings: Settings, context: Context) -> Computed:
    """Write `evaluation/step-000010.parquet`: responses to held-out prompts; metrics are means over them."""
    scores_B = scores["scores"].float()
    columns = text_columns(rollout, context.tokenizer) | {
        "tokens": lists(rollout, "tokens"),
        "reward": scores_B.tolist(),
    }
    write_rows(columns, EVALUATION, context)
    response_tokens = rollout.mask("logprobs").sum(1).mean()
    return Computed(metrics={"score": float(scores_B.mean()), "response_tokens": float(response_tokens)})


def lists(batch: Batch, key: str) -> list[list[Any]]:
    """The rows of a column, each as long as it is."""
    return [row.tolist() for row in batch.columns[key]]


def text_columns(rollout: Batch, tokenizer: str) -> dict[str, list[str]]:
    """Prompts and responses as text, without special tokens."""
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
    path.parent.mkdir(parents=True, exist_ok=True)
    number = len(context.row_ids)
    places = {
        "step": [context.step] * number,
        "weight_version": [context.versions.get("actor", 0)] * number,
        "row_id": list(context.row_ids),
    }
    partial = path.with_suffix(".partial")
    pq.write_table(pa.table({**columns, **places}), partial)
    return partial.replace(path)
