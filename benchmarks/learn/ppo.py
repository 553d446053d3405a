"""Does PPO learn? Reward and an independent judge of greedy continuations of held-out openings, before and after.

    python -m benchmarks.learn.ppo [--seeds 1 2 3] [--steps 20] [--reward-steps 60] [--home .rlhf]
        [--plot docs/images/learn_ppo.png]

Trains the reward model first unless `<home>/runs/reward/latest` is there. The anchor is a bare policy gradient with a
batch-mean baseline on the same task: reward +1.43, judge +0.19 at a KL of 3 nats in 40 steps.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.demo.judge import Judge
from benchmarks.demo.outcome import DemoOutcome, column, evaluations, read_metrics, texts
from benchmarks.demo.pretrained import prepare_model
from benchmarks.demo.ratings import prepare_ratings

GOALS = {"reward_gain": 1.4, "judge_gain": 0.19, "kl": 3.0}
LIMIT_SECONDS = 7200


def main() -> None:
    """Train, read, draw, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--reward-steps", type=int, default=60, help="where the reward model is trained first")
    parser.add_argument("--home", type=Path, default=Path(".rlhf"))
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    home = options.home.resolve()
    prepare_model("smollm2", home / "models" / "smollm2", home / "downloads")
    prepare_ratings(home / "data", home / "downloads")
    judge = Judge(home / "judge", home / "downloads")
    if not (home / "runs" / "reward" / "latest" / "reward").is_dir():
        run("reward", reward_parameters(home, options.reward_steps))
    runs = [run("ppo", ppo_parameters(home, seed, options.steps)) for seed in options.seeds]
    if options.plot:
        draw(runs, options.seeds, judge, options.plot)
    print(json.dumps(summary(runs, options.seeds, judge)))


def reward_parameters(home: Path, steps: int) -> dict[str, Any]:
    """Parameters of the reward model's training, those of the deployment rlhf/reward."""
    pairs = str(home / "data" / "preferences.parquet")
    return {
        "pairs": {"path": pairs},
        "held_out": {"path": pairs, "split": "held_out"},
        "reward": {"path": str(home / "models" / "smollm2"), "head": "scalar", "new_head": True},
        "steps": steps,
        "output_dir": str(home / "runs" / "reward"),
    }


def ppo_parameters(home: Path, seed: int, steps: int) -> dict[str, Any]:
    """Parameters of the deployment rlhf/ppo with another seed, more evaluations, actor and critic trained at once."""
    model, prompts = str(home / "models" / "smollm2"), str(home / "data" / "prompts.parquet")
    learned = {"path": str(home / "runs" / "reward" / "latest" / "reward"), "head": "scalar"}
    return {
        "prompts": {"path": prompts},
        "held_out": {"path": prompts, "split": "held_out"},
        "actor": {"path": model},
        "ref": {"path": model},
        "reward": learned,
        "critic": learned,
        "steps": steps,
        "seed": seed,
        "plan": "split",
        "algo": {"evaluate_every": 5},
        "output_dir": str(home / "runs" / "learn_ppo"),
    }


def run(algorithm: str, parameters: Mapping[str, Any]) -> Path:
    """Run an algorithm on two CPU devices in a process of its own; returns its folder."""
    folder = Path(str(parameters["output_dir"]))
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "parameters.json"
    file.write_text(json.dumps(parameters))
    command = str(Path(sys.executable).parent / "prefect-rlhf")
    arguments = [algorithm, "--parameters", str(file), "--devices", "2"]
    subprocess.run([command, *arguments], check=True, timeout=LIMIT_SECONDS, stdout=sys.stderr)
    return (folder / "latest").resolve()


def summary(runs: Sequence[Path], seeds: Sequence[int], judge: Judge) -> dict[str, Any]:
    """Gains of each seed and their means, beside the goals."""
    results = []
    for seed, run_dir in zip(seeds, runs, strict=True):
        outcome = DemoOutcome.read(run_dir, judge)
        gains = {
            "reward_gain": outcome.reward_after - outcome.reward_before,
            "judge_gain": outcome.judge_after - outcome.judge_before,
        }
        numbers = {name: value for name, value in asdict(outcome).items() if name != "model"}
        results.append({"seed": seed} | {name: round(value, 4) for name, value in (gains | numbers).items()})
    means = {name: round(mean(result[name] for result in results), 4) for name in GOALS}
    return {"runs": results, "means": means, "goals": GOALS}


def draw(runs: Sequence[Path], seeds: Sequence[int], judge: Judge, file: Path) -> None:
    """Reward and judge on held-out openings, and KL of the rollouts, against steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(12, 3.2), layout="constrained")
    for seed, run_dir in zip(seeds, runs, strict=True):
        files = evaluations(run_dir)
        at = [int(file.stem.removeprefix("step-")) for file in files]
        trained = [step for step in read_metrics(run_dir) if "actor_train.loss" in step]
        axes[0].plot(at, [mean(column(file, "reward")) for file in files], marker="o", label=f"seed {seed}")
        axes[1].plot(at, [mean(judge.compound(texts(file))) for file in files], marker="o")
        axes[2].plot([s["step"] for s in trained], [s["kl_penalised_rewards.kl"] for s in trained])
    titles = ("reward (held out, greedy)", "VADER (held out, greedy)", "KL of rollouts (nats a response)")
    for axis, title in zip(axes, titles, strict=True):
        axis.set(title=title, xlabel="step")
        axis.grid(alpha=0.3)
    axes[0].legend(frameon=False)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)


if __name__ == "__main__":
    main()
