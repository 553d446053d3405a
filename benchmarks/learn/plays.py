"""What `benchmarks.learn` runs and reads for conversations: calculator and guess, by GRPO without a reference model.

The share solved is that of greedy plays of held-out tasks. Of the calculator, `without_tool` is the share that the
trained model solves greedily without a play: from the same prompts, and from the bare questions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.demo.outcome import read_metrics
from benchmarks.learn import calculator, guess

GOALS = {"before": 0.4, "after": 0.85, "without_tool": 0.3}
"""Below the first before, at least the second after, below the third without the tool."""
STEPS = {"calculator": 30, "guess": 20}
PLAYS: Mapping[str, Mapping[str, Any]] = {
    "calculator": {
        "function": f"{Path(calculator.__file__).resolve()}:solve",
        "max_tokens": 64,
        "max_turns": 3,
        "expected_turns": 2,
        "expected_answer_tokens": 11,
    },
    "guess": {
        "function": f"{Path(guess.__file__).resolve()}:opens",
        "max_tokens": 80,
        "max_turns": guess.DIGITS + 1,
        "expected_turns": guess.DIGITS + 1,
        "expected_answer_tokens": 4,
    },
}
ALGO: Mapping[str, Mapping[str, Any]] = {
    "calculator": {
        "batch_size": 8,
        "sampling": {"max_new_tokens": 20, "stop": ["</calc>"], "temperature": 0.8},
    },
    "guess": {"batch_size": 6, "advantage": "turns", "sampling": {"max_new_tokens": 6, "temperature": 0.8}},
}
MOST_WITHOUT_TOOL = 48
"""Tokens of a response without the calculator."""


def prepare(home: Path, name: str) -> Path:
    """Write the tasks as a Parquet file, and return its path."""
    file = home / "data" / f"{name}.parquet"
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table((calculator if name == "calculator" else guess).tasks()), file)
    return file


def parameters(home: Path, name: str, seed: int, steps: int) -> dict[str, Any]:
    """Return the flow's parameters."""
    prompts = {"path": str(home / "data" / f"{name}.parquet"), "chat_template": True}
    shared = {
        "samples_per_prompt": 8,
        "kl": {"coefficient": 0},
        "mean_over": "tokens",
        "evaluate_every": 10,
        "optimizer": {"lr": 3e-5, "warmup_steps": 3},
    }
    return {
        "prompts": prompts,
        "held_out": {**prompts, "split": "held_out"},
        "actor": {"path": str(home / "models" / "smollm2")},
        "play": {**PLAYS[name], "workers": 1},
        "steps": steps,
        "seed": seed,
        "algo": {**shared, **ALGO[name]},
        "output_dir": str(home / "runs" / f"learn_{name}"),
    }


def summary(home: Path, run_dir: Path, name: str, seed: int, minutes: float) -> dict[str, Any]:
    """Return what is printed."""
    evaluated = read_metrics(run_dir, "evaluation.jsonl")
    by_step = {int(each["step"]): round(each["actor_evaluation.play/solved"], 3) for each in evaluated}
    without = {"without_tool": without_tool(home, run_dir / "actor")} if name == "calculator" else {}
    return {
        "algorithm": name,
        "metric": "share of held-out tasks that greedy plays solve",
        "before": by_step[min(by_step)],
        "after": by_step[max(by_step)],
        "goal": GOALS,
        "minutes": round(minutes, 1),
        "seed": seed,
        "by_step": by_step,
        **without,
    }


def without_tool(home: Path, model: Path) -> dict[str, float]:
    """Return the shares of held-out tasks that a model solves without the calculator, by the prompt that it gets."""
    rows = pq.read_table(home / "data" / "calculator.parquet").to_pylist()
    rows = [row for row in rows if row["split"] == "held_out"]
    prompts = {"same prompt": [row["prompt"] for row in rows], "question alone": [row["prompt"][-1:] for row in rows]}
    answers = [row["answer"] for row in rows]
    shares = {}
    for name, asked in prompts.items():
        said = greedy(model, asked)
        right = [calculator.last_number(text) == answer for text, answer in zip(said, answers, strict=True)]
        shares[name] = round(mean(right), 3)
    return shares


def greedy(model: Path, prompts: Sequence[Sequence[Mapping[str, str]]]) -> list[str]:
    """Return greedy responses of a model folder, by transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer  # seconds to import

    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    texts = [
        tokenizer.apply_chat_template([dict(turn) for turn in prompt], tokenize=False, add_generation_prompt=True)
        for prompt in prompts
    ]
    asked = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    speaker = AutoModelForCausalLM.from_pretrained(model, dtype="float32").eval()
    with torch.no_grad():
        rows = speaker.generate(
            **asked, max_new_tokens=MOST_WITHOUT_TOOL, do_sample=False, pad_token_id=tokenizer.pad_token_id
        )
    said = rows[:, asked["input_ids"].shape[1] :]
    return list(tokenizer.batch_decode(said, skip_special_tokens=True))
