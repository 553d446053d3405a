"""Does an algorithm learn? A small model on held-out data, before and after.

    python -m benchmarks.learn {grpo,grpo-dynamic,rloo,remax,ppo,ppo-shared} [--rank R [--lr LR]] [--seed N]
        [--steps N] [--plot FILE]
    python -m benchmarks.learn {calculator,guess} [--seed N] [--steps N] [--plot FILE]
    python -m benchmarks.learn {sft,dpo} [--rank R [--lr LR]] [--seed N] [--steps N] [--home .rlhf]
    python -m benchmarks.learn safe-rlhf [--seed N] [--steps N] [--home .rlhf]

SmolLM2-135M-Instruct on two CPU devices. Those of the first line learn `sums.py` by Python rewards, and are judged by
greedy accuracy; for the others see `learn_offline.py`, `learn_safe.py` and `learn_plays.py`. Last line JSON:
algorithm, metric, before, after, minutes, and `processor_minutes` of the run's processes; kl (nats a response at the
last step), cost_before, cost_after and limit if there are any; of ppo-shared `resident_bytes` of both forms of PPO, of
groups `trained_tokens`, in all and up to each evaluation, of calculator `without_tool`. With --rank the actor has an
adapter of that rank on every matrix, and ten times the learning rate or --lr, which are then `rank` and `lr`.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.demo.outcome import column, evaluations, read_metrics
from benchmarks.demo.pretrained import prepare_model
from benchmarks.learn import offline as learn_offline
from benchmarks.learn import plays as learn_plays
from benchmarks.learn import safe as learn_safe
from benchmarks.learn import sums
from benchmarks.learn.ppo import run
from benchmarks.learn.resident_bytes import resident_bytes

GOALS = {"grpo": 0.3, "grpo-dynamic": 0.3, "rloo": 0.2, "remax": 0.2, "ppo": 0.2, "ppo-shared": 0.2}
"""By how much accuracy shall rise."""
STEPS = {"grpo": 40, "grpo-dynamic": 30, "rloo": 40, "remax": 40, "ppo": 40, "ppo-shared": 40}
SAMPLING = {"max_new_tokens": 12}
GROUP: Mapping[str, Any] = {
    "batch_size": 8,
    "samples_per_prompt": 8,
    "kl": {"coefficient": 0.01},
    "mean_over": "tokens",
    "optimizer": {"lr": 2e-5, "warmup_steps": 3},
}
PPO: Mapping[str, Any] = {
    "batch_size": 48,
    "kl": {"kind": "fixed", "coefficient": 0.01},
    "update": {"epochs": 1, "mini_batches": 2},
    "actor_optimizer": {"lr": 1e-5, "warmup_steps": 3},
}
ALGORITHMS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "grpo": ("grpo", GROUP),
    "grpo-dynamic": ("grpo", {**GROUP, "over_sampling": 2}),
    "rloo": ("grpo", {**GROUP, "advantage": "rloo"}),
    "remax": (
        "remax",
        {"batch_size": 48, "kl": {"kind": "fixed", "coefficient": 0.01}, "optimizer": {"lr": 2e-5, "warmup_steps": 3}},
    ),
    "ppo": ("ppo", PPO),
    "ppo-shared": ("ppo", {**PPO, "actor_optimizer": {"lr": 1e-5, "head_lr": 1e-3, "warmup_steps": 3}}),
}
"""The flow of each, and its settings."""
SHARED_PLAN = "interleaving"
"""The reference model is on one device; both forms of PPO are counted under it."""
RATE_OF_ADAPTERS = 10
"""Their learning rate over that of all weights (Schulman et al. 2025, LoRA Without Regret)."""
KL = ("kl_penalised_rewards.kl", "actor_train.kl_per_token")


def main() -> None:
    """Train, read, draw, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("algorithm", choices=[*ALGORITHMS, *learn_offline.STEPS, "safe-rlhf", *learn_plays.STEPS])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--home", type=Path, default=Path(".rlhf"))
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--rank", type=int, help="train an adapter of this rank in place of all weights")
    parser.add_argument("--lr", type=float, help="learning rate of --rank, by default ten times that of all weights")
    options = parser.parse_args()
    home, name = options.home.resolve(), options.algorithm
    if options.rank is not None and name not in (*ALGORITHMS, *learn_offline.STEPS):
        parser.error("--rank is for algorithms that learn sums or from stored rows")
    if options.lr is not None and options.rank is None:
        parser.error("--lr is the learning rate of an adapter: give --rank too")
    if options.plot and name not in (*ALGORITHMS, *learn_plays.STEPS):
        parser.error("--plot draws a share of held-out tasks, of which this algorithm has none")
    prepare_model("smollm2", home / "models" / "smollm2", home / "downloads")
    flow, given = prepared(home, name, options.seed, options.steps)
    given, lr = (given, {}) if options.rank is None else adapted(given, options.rank, options.lr)
    began, processor = time.monotonic(), processor_seconds()
    run_dir = run(flow, given)
    minutes, processor_minutes = (time.monotonic() - began) / 60, (processor_seconds() - processor) / 60
    found = outcome(home, run_dir, name, options.seed, minutes)
    if options.plot:
        draw(found, options.plot)
    print(json.dumps(found | lr | {"processor_minutes": round(processor_minutes, 1)}))


def adapted(given: Mapping[str, Any], rank: int, lr: float | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a run's parameters with an adapter of the actor and its learning rate, and what is printed of them."""
    name = "optimizer" if "optimizer" in given["algo"] else "actor_optimizer"
    optimizer = given["algo"][name]
    lr = RATE_OF_ADAPTERS * optimizer["lr"] if lr is None else lr
    actor = {**given["actor"], "adapter": {"rank": rank}}
    return {**given, "actor": actor, "algo": {**given["algo"], name: {**optimizer, "lr": lr}}}, {"rank": rank, "lr": lr}


def processor_seconds() -> float:
    """Return the processor seconds of processes that this one started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def prepared(home: Path, name: str, seed: int, steps: int | None) -> tuple[str, dict[str, Any]]:
    """Write what an algorithm learns from; return its flow and the flow's parameters."""
    if name in learn_offline.STEPS:
        learn_offline.prepare(home, name)
        return name, learn_offline.parameters(home, name, seed, steps or learn_offline.STEPS[name])
    if name == "safe-rlhf":
        learn_safe.prepare(home)
        return name, learn_safe.parameters(home, seed, steps or learn_safe.STEPS)
    if name in learn_plays.STEPS:
        learn_plays.prepare(home, name)
        return "grpo", learn_plays.parameters(home, name, seed, steps or learn_plays.STEPS[name])
    sums.write_sums(home / "data" / "sums.parquet")
    return ALGORITHMS[name][0], parameters(home, name, seed, steps or STEPS[name])


def outcome(home: Path, run_dir: Path, name: str, seed: int, minutes: float) -> dict[str, Any]:
    """Return what the benchmark prints."""
    if name in learn_offline.STEPS:
        return learn_offline.summary(run_dir, name, seed, minutes)
    if name == "safe-rlhf":
        return learn_safe.summary(run_dir, seed, minutes)
    if name in learn_plays.STEPS:
        return learn_plays.summary(home, run_dir, name, seed, minutes)
    found = summary(run_dir, name, seed, minutes)
    if name == "ppo-shared":
        forms = {form: parameters(home, form, 1, 1) | {"plan": SHARED_PLAN} for form in ("ppo-shared", "ppo")}
        found["resident_bytes"] = {form: resident_bytes("ppo", given) for form, given in forms.items()}
    return found


def parameters(home: Path, name: str, seed: int, steps: int) -> dict[str, Any]:
    """Return the flow's parameters."""
    flow, algo = ALGORITHMS[name]
    model, prompts = {"path": str(home / "models" / "smollm2")}, str(home / "data" / "sums.parquet")
    exact = f"{Path(sums.__file__).resolve()}:exact"
    values: dict[str, Any] = {"critic": {**model, "head": "scalar", "new_head": True}} if name == "ppo" else {}
    if name == "ppo-shared":
        values = {"actor": {**model, "head": "lm+scalar", "new_head": True}, "plan": SHARED_PLAN}
    return {
        "prompts": {"path": prompts, "chat_template": True},
        "held_out": {"path": prompts, "split": "held_out", "chat_template": True},
        "actor": model,
        "ref": model,
        "reward": {"functions": {"exact": {"function": exact}}},
        **values,
        "steps": steps,
        "seed": seed,
        "algo": {"sampling": SAMPLING, "evaluate_every": 10, **algo},
        "output_dir": str(home / "runs" / f"learn_{name}"),
    }


def accuracies(run_dir: Path) -> dict[int, float]:
    """Return the greedy accuracy on held-out prompts, by step."""
    return {int(file.stem.removeprefix("step-")): mean(column(file, "reward")) for file in evaluations(run_dir)}


def kl_of(run_dir: Path) -> float:
    """Return the KL to the model at the start of the last step that has one: nats a response."""
    trained = [step for step in read_metrics(run_dir) if any(key in step for key in KL)][-1]
    if KL[0] in trained:
        return float(trained[KL[0]])
    return float(trained[KL[1]] * trained["grpo_advantages.response_tokens"])


def summary(run_dir: Path, name: str, seed: int, minutes: float) -> dict[str, Any]:
    """Return what is printed of an algorithm that learns sums."""
    by_step = accuracies(run_dir)
    before, after = by_step[min(by_step)], by_step[max(by_step)]
    return {
        "algorithm": name,
        "metric": "greedy accuracy on held-out sums",
        "before": round(before, 4),
        "after": round(after, 4),
        "goal": GOALS[name],
        "kl": round(kl_of(run_dir), 3),
        "minutes": round(minutes, 1),
        "seed": seed,
        "by_step": {step: round(value, 3) for step, value in by_step.items()},
        **trained_tokens(run_dir, list(by_step)),
    }


def trained_tokens(run_dir: Path, steps: Sequence[int]) -> dict[str, Any]:
    """Return the response tokens in the losses of a run, and of what was before each of `steps`; of groups alone."""
    name = "grpo_advantages.trained_tokens"
    by_step = [step.get(name, 0.0) for step in read_metrics(run_dir)]
    if not any(by_step):
        return {}
    before = {step: round(sum(by_step[:step])) for step in steps}
    return {"trained_tokens": round(sum(by_step)), "trained_tokens_by_step": before}


def draw(found: Mapping[str, Any], file: Path) -> None:
    """Draw the share of held-out tasks against steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(5, 3.2), layout="constrained")
    axis.plot(list(found["by_step"]), list(found["by_step"].values()), marker="o")
    axis.set(title=f"{found['algorithm']}: {found['metric']}", xlabel="step", ylim=(0, 1.02))
    axis.grid(alpha=0.3)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)


if __name__ == "__main__":
    main()
