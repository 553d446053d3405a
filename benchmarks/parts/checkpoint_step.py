"""What a checkpoint costs a step: the same DPO run without checkpoints and with one every few steps.

    python -m benchmarks.parts.checkpoint_step --steps 13 --every 4

A random Llama of SmolLM2-135M's shape on CPU ranks. Seconds are those from the end of one train_step to the end of the
next: in the run without checkpoints, after a step that has a checkpoint, and as a mean over all, since what is written
behind the steps takes processor time from them where ranks compute on the same processors. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from prefect.testing.utilities import prefect_test_harness
from transformers import LlamaConfig, LlamaForCausalLM

from prefect_rlhf.flows.dpo import dpo
from prefect_rlhf.tasks.running.journal import TaskRunSpan, read_spans
from tests.support.runs import leased
from tests.tasks.small_tokenizer import WORDS, save_small_tokenizer


def main() -> None:
    """Run without checkpoints and with them, in turn; print what a step took."""
    asked = parse_arguments()
    with tempfile.TemporaryDirectory(dir=asked.folder) as temporary, prefect_test_harness(server_startup_timeout=120):
        folder = Path(temporary)
        actor, pairs = make_model(folder / "model", asked), make_pairs(folder, asked)
        files = {"actor": {"path": actor}, "pairs": {"path": pairs}, "held_out": {"path": pairs, "split": "held_out"}}
        without = [spans_of(asked, files, folder / f"without-{turn}", None) for turn in range(asked.rounds)]
        with_them = [spans_of(asked, files, folder / f"with-{turn}", asked.every) for turn in range(asked.rounds)]
    print(json.dumps(summary(asked, without, with_them)))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=13)
    parser.add_argument("--every", type=int, default=4, help="steps between checkpoints")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--plan", default="flattening")
    parser.add_argument("--rounds", type=int, default=1, help="times that both runs are made")
    parser.add_argument("--batch-size", type=int, default=8, help="pairs of a step")
    parser.add_argument("--tokens", type=int, default=64, help="words of each answer")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--hidden", type=int, default=576, help="a multiple of 192: three heads of keys of 64")
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--folder", default=None, help="where checkpoints are written; a temporary folder without")
    return parser.parse_args()


def make_model(folder: Path, asked: argparse.Namespace) -> str:
    """Write a random Llama of the shape asked for, with a tokenizer of a few words."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=asked.hidden,
        intermediate_size=asked.hidden * 8 // 3,
        num_hidden_layers=asked.layers,
        num_attention_heads=asked.hidden // 64,
        num_key_value_heads=3,
        head_dim=64,
        vocab_size=asked.vocabulary,
        max_position_embeddings=4 * asked.tokens,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return save_small_tokenizer(folder)


def make_pairs(folder: Path, asked: argparse.Namespace) -> str:
    """Write pairs of random answers that are `tokens` words long, the last few held out."""
    words, number = random.Random(0), 5 * asked.batch_size
    answers = [" ".join(words.choices(WORDS[3:], k=asked.tokens)) for _ in range(2 * number)]
    columns = {
        "prompt": ["what is it"] * number,
        "chosen": answers[:number],
        "rejected": answers[number:],
        "split": ["train"] * (4 * asked.batch_size) + ["held_out"] * asked.batch_size,
    }
    pq.write_table(pa.table(columns), folder / "pairs.parquet")
    return str(folder / "pairs.parquet")


def spans_of(asked: argparse.Namespace, files: dict[str, Any], folder: Path, every: int | None) -> list[TaskRunSpan]:
    """Run DPO; return its task runs. Evaluations before the first step and after the last are not measured."""
    given = {
        **files,
        "ref": files["actor"],
        "algo": {"batch_size": asked.batch_size, "evaluate_every": asked.steps},
        "steps": asked.steps,
        "plan": asked.plan,
        "checkpoint_every": every,
        "output_dir": str(folder),
    }
    with leased(asked.ranks):
        state = dpo(**dpo.validate_parameters(given), return_state=True)
    return list(read_spans(Path(state.result()["run_dir"])))


def summary(
    asked: argparse.Namespace, without: Sequence[list[TaskRunSpan]], with_them: Sequence[list[TaskRunSpan]]
) -> dict[str, Any]:
    """Medians over rounds and steps; the first step, which makes what later ones use again, is left out."""
    plain = [gap for spans in without for gap in gaps(spans).values()]
    by_step = [(step, gap) for spans in with_them for step, gap in gaps(spans).items()]
    after = [gap for step, gap in by_step if step % asked.every == 1 % asked.every]
    copies, commits = (
        [span for spans in with_them for span in spans if span.kind == kind and span.step < asked.steps]
        for kind in ("checkpoint", "commit")
    )
    every_step = mean(gap for _, gap in by_step)
    return {
        "ranks": asked.ranks,
        "megabytes": round(max(span.bytes_moved for span in (*copies, *commits)) / 1e6, 1),
        "seconds_without": round(median(plain), 3),
        "seconds_after_checkpoint": round(median(after), 3),
        "ratio_after_checkpoint": round(median(after) / median(plain), 3),
        "mean_seconds_without": round(mean(plain), 3),
        "mean_seconds_with": round(every_step, 3),
        "extra_seconds_per_checkpoint": round((every_step - mean(plain)) * asked.every, 3),
        "checkpoint_seconds": round(median(span.end - span.start for span in copies), 3),
        "commit_seconds": round(median(span.end - span.start for span in commits), 3),
    }


def gaps(spans: Sequence[TaskRunSpan]) -> dict[int, float]:
    """Return seconds from the end of the train_step before to that of each step, from the third step on."""
    ends = {span.step: span.end for span in spans if span.kind == "train_step"}
    return {step: ends[step] - ends[before] for before, step in pairwise(sorted(ends)) if before > 1}


if __name__ == "__main__":
    main()
