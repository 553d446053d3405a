"""What `benchmarks.learn` runs and reads for Safe RLHF: sentiment as the reward, overstatement as the cost.

Both models are trained by `rlhf/reward` unless they are there: the reward model on sentences that people rated, the
cost model on pairs that the rule of `benchmarks/demo/costs.py` orders, most costly first. The limit holds for what is
sampled, so costs are means of the first and of the last steps' responses; rewards, of greedy held-out responses.
"""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.demo.costs import overstatements
from benchmarks.demo.outcome import column, evaluations, read_metrics, texts
from benchmarks.demo.ratings import prepare_ratings
from benchmarks.learn.ppo import reward_parameters, run

STEPS, LIMIT = 30, -0.25
STEPS_OF_A_MEAN = 5
SCORER_STEPS = {"reward": 60, "cost": 40}


def prepare(home: Path) -> None:
    """Write the data, and train the reward and the cost model, unless they are there."""
    prepare_ratings(home / "data", home / "downloads")
    for name, steps in SCORER_STEPS.items():
        if not (home / "runs" / name / "latest" / "reward").is_dir():
            run("reward", scorer_parameters(home, name, steps))


def scorer_parameters(home: Path, name: str, steps: int) -> dict[str, Any]:
    """Return the parameters of `rlhf/reward` for one of the two models; scores of the cost model lie around 0."""
    given = reward_parameters(home, steps)
    if name == "reward":
        return given
    pairs = str(home / "data" / "costs.parquet")
    return given | {
        "pairs": {"path": pairs},
        "held_out": {"path": pairs, "split": "held_out"},
        "algo": {"centering": 0.01, "optimizer": {"lr": 1e-4, "head_lr": 1e-3, "warmup_steps": 5}},
        "output_dir": str(home / "runs" / "cost"),
    }


def parameters(home: Path, seed: int, steps: int) -> dict[str, Any]:
    """Return the flow's parameters."""
    model, prompts = {"path": str(home / "models" / "smollm2")}, str(home / "data" / "prompts.parquet")
    scorers = {
        name: {"path": str(home / "runs" / name / "latest" / "reward"), "head": "scalar"} for name in SCORER_STEPS
    }
    return {
        "prompts": {"path": prompts},
        "held_out": {"path": prompts, "split": "held_out"},
        "pretrain": {"path": str(home / "data" / "preferences.parquet"), "form": "text", "text_column": "chosen"},
        "actor": model,
        "ref": model,
        **scorers,
        "critic": scorers["reward"],
        "cost_critic": scorers["cost"],
        "steps": steps,
        "seed": seed,
        "plan": "split",
        "algo": {
            "limit": LIMIT,
            "lagrange": {"lr": 0.5, "most": 3.0},
            "evaluate_every": 5,
            "ptx": 0.01,
            "ptx_batch_size": 8,
        },
        "output_dir": str(home / "runs" / "learn_safe_rlhf"),
    }


def summary(run_dir: Path, seed: int, minutes: float) -> dict[str, Any]:
    """Return what the benchmark prints: rewards, costs before and after, and the multipliers on the way."""
    files, steps = evaluations(run_dir), read_metrics(run_dir)
    rewards, greedy_costs = ([round(mean(column(file, name)), 3) for file in files] for name in ("reward", "cost"))
    words = [round(mean(map(overstatements, texts(file))), 3) for file in files]
    costs, multipliers = ([step[f"lagrange_multiplier.{name}"] for step in steps] for name in ("cost", "multiplier"))
    return {
        "algorithm": "safe-rlhf",
        "metric": "reward of held-out responses while their cost stays under its limit",
        "before": rewards[0],
        "after": rewards[-1],
        "cost_before": round(mean(costs[:STEPS_OF_A_MEAN]), 3),
        "cost_after": round(mean(costs[-STEPS_OF_A_MEAN:]), 3),
        "limit": LIMIT,
        "greedy_costs": greedy_costs,
        "overstatements_before": words[0],
        "overstatements_after": words[-1],
        "multipliers": [round(multiplier, 3) for multiplier in multipliers[:: max(1, len(multipliers) // 6)]],
        "minutes": round(minutes, 1),
        "seed": seed,
        "by_step": {int(file.stem.removeprefix("step-")): reward for file, reward in zip(files, rewards, strict=True)},
    }
