"""The outcome of a PPO run, read from its files: rewards, an independent judge, KL, samples, and seconds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import pyarrow.parquet as pq

from benchmarks.demo.judge import Judge
from prefect_rlhf.tasks.data.rollouts import EVALUATION, step_files


@dataclass(frozen=True, slots=True)
class DemoOutcome:
    """`reward_*` and `judge_*` are means over greedy continuations of held-out openings, before and after training.

    `kl` is nats per response against the reference model in the last step; `seconds_per_step` the median of steps.
    """

    model: str
    reward_before: float
    reward_after: float
    judge_before: float
    judge_after: float
    kl: float
    seconds_per_step: float
    orchestration_share: float
    fingerprint_share: float

    @classmethod
    def read(cls, run_dir: Path, judge: Judge) -> DemoOutcome:
        """Read the run in `run_dir`."""
        first, *_, last = evaluations(run_dir)
        steps = [step for step in read_metrics(run_dir) if "actor_train.loss" in step]
        return cls(
            model=str(run_dir / "actor"),
            reward_before=mean(column(first, "reward")),
            reward_after=mean(column(last, "reward")),
            judge_before=mean(judge.compound(texts(first))),
            judge_after=mean(judge.compound(texts(last))),
            kl=steps[-1]["kl_penalised_rewards.kl"],
            seconds_per_step=median(step["seconds"] for step in steps),
            orchestration_share=median(step["orchestration_share"] for step in steps),
            fingerprint_share=median(step["fingerprint_share"] for step in steps),
        )

    def as_json(self, **more: object) -> str:
        """Return it as a JSON line, with `more` fields."""
        rounded = {key: round(value, 4) if isinstance(value, float) else value for key, value in asdict(self).items()}
        return json.dumps(rounded | more)


def evaluations(run_dir: Path) -> list[Path]:
    """Return the evaluation files, oldest first, including those before the first and after the last step."""
    return step_files(run_dir, EVALUATION)


def read_metrics(run_dir: Path, file: str = "metrics.jsonl") -> list[Mapping[str, float]]:
    """Read the metrics of each step so far, or of each evaluation."""
    return [json.loads(line) for line in (run_dir / file).read_text().splitlines()]


def texts(file: Path) -> list[str]:
    """Return openings with their continuations."""
    return [
        opening + response for opening, response in zip(column(file, "prompt"), column(file, "response"), strict=True)
    ]


def column(file: Path, name: str) -> Sequence[Any]:
    """Read a column of a Parquet file."""
    values: list[Any] = pq.read_table(file, columns=[name]).column(name).to_pylist()
    return values
