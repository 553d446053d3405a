"""TRL's GRPOTrainer with `tools=` at the work of `play_step.py`, in a process of its own: prints its times as JSON.

Settings favour TRL, as in `trl_grpo.py`. A model of this size calls no tool by itself, so every turn counts as a call,
whatever the model says; TRL does the rest: it calls the tool, renders its answer, and continues the row. A turn has as
many tokens as ours; by itself TRL would let the first turn have those of the whole row.
"""

from __future__ import annotations

import json
import sys
import time
from statistics import median
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import grpo_trainer

from benchmarks.beside_trl import play_work
from benchmarks.beside_trl.play_work import PlayWork, vowels
from benchmarks.beside_trl.trl_grpo import SHARED
from benchmarks.beside_trl.trl_stopwatch import Stopwatch


def make_trainer(work: PlayWork, stopwatch: Stopwatch) -> GRPOTrainer:
    """Make TRL's trainer, for which no token ends a turn."""
    tokenizer = AutoTokenizer.from_pretrained(work.with_tools(), padding_side="left")
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)
    tokenizer.response_template = {}  # `as_call` reads turns
    seconds = work.seconds_of_step
    settings = GRPOConfig(
        **SHARED,
        max_steps=len(seconds),
        per_device_train_batch_size=work.rows,
        num_generations=work.samples,
        max_completion_length=work.most_tokens,
        max_tool_calling_iterations=work.turns - 1,
        learning_rate=work.learning_rate,
    )

    def look_up(question: str) -> str:
        time.sleep(seconds[min(len(stopwatch.steps), len(seconds) - 1)])
        return play_work.look_up(question)

    look_up.__doc__ = play_work.look_up.__doc__
    prompts = [[{"role": "user", "content": work.question(number)}] for number in range(work.batch_size * len(seconds))]
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(work.model, dtype=torch.bfloat16),
        reward_funcs=reward,
        args=settings,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
        tools=[look_up],
    )
    trainer.eos_token_ids, trainer.generation_config.eos_token_id = [], None
    trainer.generation_kwargs["eos_token_id"] = None  # it would be put back before each generation
    trainer.model.generation_config.eos_token_id = None
    trainer.generation_config.max_new_tokens = work.response_tokens
    trainer.generation_kwargs["max_new_tokens"] = work.response_tokens
    return trainer


def as_call(tokenizer: Any, ids: list[int], **_: Any) -> dict[str, Any]:
    """Read a turn as a call of the tool."""
    call = {"name": "look_up", "arguments": {"question": ""}}
    return {
        "role": "assistant",
        "content": tokenizer.decode(ids, skip_special_tokens=True),
        "tool_calls": [{"type": "function", "function": call}],
    }


def reward(completions: list[list[dict[str, Any]]], **_: Any) -> list[float]:
    """Score all turns of each row."""
    return [vowels("".join(turn["content"] for turn in row if turn["role"] == "assistant")) for row in completions]


def measure(work: PlayWork) -> dict[str, Any]:
    """Run the steps; return medians by the tool's seconds. Exits with a line for rows of other turns or lengths."""
    torch.set_num_threads(work.threads)
    stopwatch = Stopwatch()
    grpo_trainer.parse_response = as_call
    trainer = make_trainer(work, stopwatch)
    trainer.add_callback(stopwatch)
    loop = trainer._tool_call_loop

    def counted(*arguments: Any) -> Any:
        found = loop(*arguments)
        masks, _, _, _, calls, *_ = found
        own = {sum(mask) for mask in masks}
        if own != {work.turns * work.response_tokens} or calls != work.rows * (work.turns - 1):
            sys.exit(f"trl_play: {sorted(own)} tokens of the model in a row, and {calls} calls of the tool")
        return found

    trainer._tool_call_loop = counted
    trainer._generate = stopwatch.watch(lambda *_: "generate", trainer._generate)
    trainer.train()
    return by_tool(work, stopwatch) | {"seconds_per_step": stopwatch.median("step")}


def by_tool(work: PlayWork, stopwatch: Stopwatch) -> dict[str, Any]:
    """Return the median seconds of a step and of its generation, by the tool's seconds."""
    found: dict[str, dict[str, float]] = {"seconds_per_call": {}, "details": {}}
    for seconds in dict.fromkeys(work.tool_seconds):
        name = f"{1000 * seconds:g}ms"
        steps = [
            each for each, of_step in zip(stopwatch.steps, work.seconds_of_step, strict=True) if of_step == seconds
        ]
        steps = steps[1:] if seconds == work.tool_seconds[0] else steps
        found["seconds_per_call"][f"generate {name}"] = median(each["generate"] for each in steps)
        found["details"][name] = median(each["step"] for each in steps)
    return found


if __name__ == "__main__":
    print(json.dumps(measure(PlayWork(**json.loads(sys.argv[1])))))
