"""Our side of `ppo_step.py`: the flow `rlhf/ppo`."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.our_step import train
from benchmarks.ppo_work import PPOWork


def flow_parameters(work: PPOWork, folder: Path) -> dict[str, Any]:
    """Parameters of the flow: one step more than is measured; evaluation only before the first and after the last."""
    scored = {"path": work.model, "head": "scalar", "new_head": True}
    optimizer = {"lr": work.learning_rate}
    return {
        "prompts": {"path": work.prompts},
        "held_out": {"path": work.prompts, "split": "held_out"},
        "actor": {"path": work.model},
        "ref": {"path": work.model},
        "critic": scored,
        "reward": scored,
        "output_dir": str(folder),
        "steps": work.steps + 1,
        "plan": work.plan,
        "algo": {
            "batch_size": work.batch_size,
            "sampling": {"max_new_tokens": work.response_tokens, "stop_at_eos": False},
            "update": {"epochs": work.epochs, "mini_batches": work.mini_batches},
            "kl": {"coefficient": work.kl_coefficient},
            "actor_optimizer": optimizer,
            "critic_optimizer": optimizer,
            "evaluate_every": work.steps + 1,
        },
    }


if __name__ == "__main__":
    asked = PPOWork(**json.loads(sys.argv[1]))
    train("ppo", asked, partial(flow_parameters, asked))
