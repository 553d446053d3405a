"""`ProceduralDataset.score_answer` of `reasoning_gym/dataset.py`, reasoning-gym 0.1.25 (Apache 2.0)."""

from typing import Any, Optional  # noqa: UP035  as it stands there


def score_answer(answer: Optional[str], entry: dict[str, Any]) -> float:  # noqa: UP045  likewise
    oracle_answer = entry["answer"]
    reward = 0.0
    if isinstance(answer, str) and len(answer) > 0:
        if answer == oracle_answer:
            reward = 1.0
        elif oracle_answer in answer:
            reward = len(oracle_answer) / len(answer)
    return reward
