"""Rollouts as Parquet files that can be read during the run: a file per step, written and then renamed.

Columns: prompt, response, user_message (text), tokens (prompt and response), logprobs, advantages (per response token),
reward (the reward model's score), step, weight_version (of the role that generated), row_id (number in the dataset's
split).
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from prefect_rlhf.engines.compute import Computed, Context
from prefect_rlhf.engines.rows import Batch, Column
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.files.atomic_file import write_atomically
from prefect_rlhf.files.storage.publish import publish
from prefect_rlhf.tasks.data.conversation import messages
from prefect_rlhf.tasks.data.role_tokenizers import have_same_text
from prefect_rlhf.tasks.data.tokenizer import load_tokenizer, reader_of
from prefect_rlhf.tasks.settings import Settings
from prefect_rlhf.tasks.tracing.operations import computation

ROLLOUTS, EVALUATION = "rollouts", "evaluation"  # folders in the run's directory
OF_PLAYS = ("mask", "turn")
STEP_FILE = re.compile(r"step-(\d+)\.parquet")  # as `write_rows` names it


@computation()
def record_rollouts(rollout: Batch, scores: Batch, advantages: Batch, settings: Settings, context: Context) -> Computed:
    """Write `rollouts/step-000003.parquet`: this step's responses with their scores (as `reward`) and advantages.

    The columns are `prompt`, `response`, `user_message` (text), `tokens`, `logprobs`, `reward`, `advantages`, `step`,
    `weight_version` and `row_id`. Several named rewards add a `reward_NAME` each; plays add `mask` and `turn` (per
    response token), `turns`, `turn_rewards` and `messages`. If your flow does not call it, the run has no rollouts.
    """
    columns = shown_columns(rollout, scores) | {
        "tokens": lists(rollout, "tokens"),
        "logprobs": lists(rollout, "logprobs"),
        "reward": scores["scores"].float().tolist(),
        "advantages": lists(advantages, "advantages"),
        **{key: lists(rollout, key) for key in OF_PLAYS if key in rollout.columns},
        **play_columns(rollout),
    }
    write_rows(columns, ROLLOUTS, context)
    return Computed()


def lists(batch: Batch, key: str) -> list[list[Any]]:
    """Return a column's rows as plain Python lists, without padding."""
    return [row.tolist() for row in batch.columns[key]]


def text_columns(rollout: Batch, tokenizer: str | None = None) -> dict[str, list[str]]:
    """Decode prompts and responses to text without special tokens: a dict with the keys `prompt` and `response`.

    `tokenizer` is a tokenizer's folder; by default the rows' own, `rollout.tokenizer`. Raises InvalidInput for a
    tokenizer that reads the rows' token ids as another text.
    """
    decode = load_tokenizer(tokenizer_of(rollout, tokenizer)).batch_decode
    tokens, lengths = lists(rollout, "tokens"), [int(length) for length in rollout.columns["prompt_length"]]
    prompts = [row[:length] for row, length in zip(tokens, lengths, strict=True)]
    responses = [row[length:] for row, length in zip(tokens, lengths, strict=True)]
    return {
        "prompt": decode(prompts, skip_special_tokens=True),
        "response": decode(responses, skip_special_tokens=True),
    }


def tokenizer_of(rows: Batch, tokenizer: str | None) -> str:
    """Return the folder of a tokenizer, or by default of the rows' own.

    Raises InvalidInput for a tokenizer that gives the rows' token ids another text than their own.
    """
    if tokenizer is None:
        return rows.tokenizer
    if isinstance(rows.written_by, str) and not _have_same_text(tokenizer, rows.written_by):
        right = f"{rows.written_by}, which wrote the tokens of these rows and is used without this argument"
        raise InvalidInput("tokenizer of text_columns", tokenizer, right)
    return tokenizer


_have_same_text = cache(have_same_text)  # a rank asks again in every step


def play_columns(rollout: Batch) -> dict[str, list[Any]]:
    """Return each row's `messages`, number of `turns` and `turn_rewards`; no column for rows without a play."""
    if "turn_rewards" not in rollout.columns:
        return {}
    read, rewards = reader_of(rollout.tokenizer), lists(rollout, "turn_rewards")
    lengths = [int(length) for length in rollout.columns["prompt_length"]]
    rows = zip(lists(rollout, "tokens"), lengths, lists(rollout, "mask"), lists(rollout, "turn"), strict=True)
    return {
        "messages": [messages(row, length, mask, turn, read) for row, length, mask, turn in rows],
        "turns": [len(row) for row in rewards],
        "turn_rewards": rewards,
    }


def shown_columns(rollout: Batch, scores: Batch) -> dict[str, list[Any]]:
    """Return the columns that people look at first, for rollouts and evaluations.

    They are `prompt` and `response` as text; `user_message`, the prompt's last user message (or a prompt that is not a
    chat); and, with several named rewards, `reward_NAME` for each.
    """
    read, tokens = reader_of(rollout.tokenizer), lists(rollout, "tokens")
    lengths = [int(length) for length in rollout.columns["prompt_length"]]
    asked = [read.asked(row[:length]) for row, length in zip(tokens, lengths, strict=True)]
    named = [name for name, rows in scores.columns.items() if name != "scores" and is_score(rows)]
    return {
        **text_columns(rollout),
        "user_message": asked,
        **{f"reward_{name}": scores[name].float().tolist() for name in named},
    }


def is_score(rows: Column) -> bool:
    """Whether a column has a number for each row."""
    return len(rows) > 0 and rows[0].dim() == 0 and rows[0].is_floating_point()


def write_rows(columns: Mapping[str, Sequence[Any]], folder: str, context: Context) -> Path:
    """Write a step's rows to `folder` below the run folder, as `step-000003.parquet`. Returns the path.

    This adds the columns `step`, `weight_version` and `row_id`. A number that is NaN, such as the reward of an unscored
    row, becomes null: in SQL, NaN is above every number. Readers never see a partial file.
    """
    path = context.run_dir / folder / f"step-{context.step:06d}.parquet"
    num_rows = len(context.row_ids)
    origins = {
        "step": [context.step] * num_rows,
        "weight_version": [context.weight_version] * num_rows,
        "row_id": list(context.row_ids),
    }
    import pyarrow as pa  # only here: a flow that names this computation needs no Parquet
    import pyarrow.parquet as pq

    table = {  # from_pandas: NaN becomes null
        name: pa.array(values, pa.infer_type(values), from_pandas=True)
        for name, values in {**columns, **origins}.items()
    }
    write_atomically(path, lambda part: pq.write_table(pa.table(table), part))
    publish(path)
    return path


def step_files(run_dir: Path, folder: str = "*") -> list[Path]:
    """Return the files that `write_rows` wrote to a folder of a run's directory, or to all, in the order of steps."""
    return sorted(run_dir.glob(f"{folder}/step-*.parquet"))


def carry_over_rollouts(earlier_run_dir: Path, run_dir: Path, last_step: int) -> int:
    """Add to `run_dir` the rows that an earlier run wrote in steps up to `last_step`; return the number of files.

    All files that `write_rows` wrote are hard-linked, or copied if hard links are impossible. A reader of `run_dir`
    then sees every step once. Existing files of `run_dir` are unchanged.
    """
    carried = 0
    for step, path in _step_files(earlier_run_dir):
        target = run_dir / path.relative_to(earlier_run_dir)
        if step <= last_step and not target.exists():
            write_atomically(target, partial(_link_or_copy, path))
            publish(target)
            carried += 1
    return carried


def remove_rollouts_after(run_dir: Path, last_step: int) -> int:
    """Remove the files of steps after `last_step`, which the resumed run writes again. Return their number."""
    files = [path for written, path in _step_files(run_dir) if written > last_step]
    for path in files:
        path.unlink()
    return len(files)


def _step_files(run_dir: Path) -> Iterator[tuple[int, Path]]:
    """Yield the step and the path of each file of rows in the run's folders."""
    for path in step_files(run_dir):
        if named := STEP_FILE.fullmatch(path.name):
            yield int(named[1]), path


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or no support for hard links
        shutil.copyfile(source, target)
