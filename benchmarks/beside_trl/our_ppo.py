"""Our side of `ppo_step.py`: the flow `rlhf/ppo`."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.beside_trl.our_step import train
from benchmarks.beside_trl.ppo_work import PPOWork
from prefect_rlhf.files.model_folder import APART


def flow_parameters(work: PPOWork, folder: Path) -> dict[str, Any]:
    """Parameters of the flow: one step more than is measured; evaluation only before the first and after the last."""
    reward = {"path": str(with_scalar_head(Path(work.model), folder / "reward_model")), "head": "scalar"}
    optimizer = {"lr": work.learning_rate}
    return {
        "prompts": {"path": work.prompts},
        "held_out": {"path": work.prompts, "split": "held_out"},
        "actor": {"path": work.model},
        "ref": {"path": work.model},
        "critic": {"path": work.model, "head": "scalar", "new_head": True},
        "reward": reward,
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


def with_scalar_head(model: Path, folder: Path) -> Path:
    """Make a folder of the model's own files and a random scalar head, as that of TRL's side is; return it."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in model.iterdir():
        if not (folder / file.name).is_file():
            (folder / file.name).symlink_to(file.resolve())
    hidden = json.loads((model / "config.json").read_text())["hidden_size"]
    save_file({"score.weight": torch.randn(1, hidden, generator=torch.Generator().manual_seed(1))}, folder / APART)
    return folder


if __name__ == "__main__":
    asked = PPOWork(**json.loads(sys.argv[1]))
    train("ppo", asked, partial(flow_parameters, asked))
