"""Our side of `play_step.py`: the flow `rlhf/grpo` with a play, whose tool waits without holding up other rows."""

from __future__ import annotations

import asyncio
import json
import math
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.beside_trl.our_step import train
from benchmarks.beside_trl.play_work import PlayWork, look_up, vowels
from benchmarks.beside_trl.step_work import Measured
from benchmarks.demo.outcome import read_metrics
from prefect_rlhf.tasks.data.rows.row_order import row_ids
from prefect_rlhf.tasks.running.journal import read_spans

SEED = 1


async def answered(row: Mapping[str, Any], say: Any) -> dict[str, float]:
    """Answer each turn but the last with a message of the tool, whatever the model said; the score is all it said."""
    said = await say()
    text = said.text
    while say.turns_left:
        await asyncio.sleep(row["tool_seconds"])
        said = await say({"role": "tool", "content": look_up(row["question"])})
        text += said.text
    return {"score": vowels(text), "tool_seconds": row["tool_seconds"]}


def write_prompts(work: PlayWork, file: Path) -> None:
    """Write a prompt for each row of each step, with the tool's seconds of its step; and held-out prompts."""
    steps = work.seconds_of_step
    number = work.batch_size * len(steps)
    seconds = [0.0] * number
    for step, of_step in enumerate(steps):
        for row in row_ids(step, work.batch_size, SEED, number):
            seconds[row] = of_step
    questions = [work.question(each) for each in range(number)]
    split = ["train"] * number
    for _ in range(work.batch_size):
        questions, seconds, split = [*questions, work.question(0)], [*seconds, 0.0], [*split, "held_out"]
    chats = [[{"role": "system", "content": look_up.__name__}, {"role": "user", "content": each}] for each in questions]
    pq.write_table(pa.table({"prompt": chats, "question": questions, "tool_seconds": seconds, "split": split}), file)


def flow_parameters(work: PlayWork, folder: Path) -> dict[str, Any]:
    """Parameters of the flow; evaluation only before the first step and after the last."""
    write_prompts(work, folder / "prompts.parquet")
    prompts = {"path": str(folder / "prompts.parquet")}
    return {
        "prompts": prompts,
        "held_out": {**prompts, "split": "held_out"},
        "actor": {"path": str(work.with_tools())},
        "play": {
            "function": f"{Path(__file__).resolve()}:answered",
            "max_tokens": work.most_tokens,
            "max_turns": work.turns,
            "workers": 1,
            "expected_turns": work.turns,
            "expected_answer_tokens": work.answer_tokens,
        },
        "output_dir": str(folder),
        "steps": len(work.seconds_of_step),
        "seed": SEED,
        "plan": work.plan,
        "algo": {
            "batch_size": work.batch_size,
            "samples_per_prompt": work.samples,
            "sampling": {"max_new_tokens": work.response_tokens, "stop_at_eos": False},
            "kl": {"coefficient": 0},
            "optimizer": {"lr": work.learning_rate},
            "evaluate_every": len(work.seconds_of_step),
        },
    }


def measured(work: PlayWork, run_dir: Path) -> Measured:
    """Return the median seconds of a step by the tool's seconds, and of a step's generate."""
    steps = {int(step["step"]): step for step in read_metrics(run_dir)}
    generate = {span.step: span.end - span.start for span in read_spans(run_dir) if span.call == "actor_generate"}
    by_seconds: dict[float, list[int]] = {}
    for step, seconds in enumerate(work.seconds_of_step, start=1):
        if step > 1:
            by_seconds.setdefault(seconds, []).append(step)
        if not math.isclose(seen := steps[step]["actor_generate.play/tool_seconds"], seconds):
            sys.exit(f"our_play: step {step} had a tool of {seen} s, expected {seconds}")
    last = steps[max(steps)]
    return Measured(
        seconds_per_step=median(steps[step]["seconds"] for of_tool in by_seconds.values() for step in of_tool),
        seconds_per_call={
            f"generate {1000 * seconds:g}ms": median(generate[step] for step in of_tool)
            for seconds, of_tool in by_seconds.items()
        },
        details={
            **{
                f"{1000 * seconds:g}ms": median(steps[step]["seconds"] for step in of_tool)
                for seconds, of_tool in by_seconds.items()
            },
            "turns": last["actor_generate.turns"],
            "own_tokens": last["actor_generate.own_tokens"],
            "observed_tokens": last["actor_generate.observed_tokens"],
        },
    )


if __name__ == "__main__":
    asked = PlayWork(**json.loads(sys.argv[1]))
    train("grpo", asked, partial(flow_parameters, asked), measured)
