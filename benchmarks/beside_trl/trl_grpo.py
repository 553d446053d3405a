"""TRL's GRPOTrainer at the work of `grpo_work.py`, in a process of its own: prints what it measured as JSON.

Everything is set in its favour where there is a choice: weights, gradients and the optimizer's moments in bfloat16 (no
autocast, no float32 main weights), no gradient checkpointing, one micro-batch per optimizer step, no reference, no
evaluation, no checkpoints, no logging to a tracker. It generates with transformers and its own choice of cache.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from benchmarks.beside_trl.grpo_work import GRPOWork, vowels
from benchmarks.beside_trl.trl_stopwatch import Stopwatch

SHARED: Mapping[str, Any] = {
    "output_dir": ".rlhf/benchmarks/trl",
    "gradient_accumulation_steps": 1,
    "temperature": 1.0,
    "loss_type": "grpo",
    "lr_scheduler_type": "constant",
    "adam_beta2": 0.95,  # as of ours
    "shuffle_dataset": False,
    "bf16": False,  # the weights are bfloat16 themselves
    "use_cpu": True,
    "gradient_checkpointing": False,
    "report_to": "none",
    "logging_strategy": "no",
    "save_strategy": "no",
    "disable_tqdm": True,
}
"""Settings of every comparison with this trainer."""


def make_trainer(work: GRPOWork, beta: float = 0.0, peft_config: Any = None) -> GRPOTrainer:
    """Make TRL's trainer, for which no token ends a response; with PEFT's settings it trains an adapter."""
    tokenizer = AutoTokenizer.from_pretrained(work.model, padding_side="left")
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)
    settings = GRPOConfig(
        **SHARED,
        beta=beta,
        max_steps=(work.steps + 1) * work.epochs * work.mini_batches,
        per_device_train_batch_size=work.rows // work.mini_batches,
        steps_per_generation=work.mini_batches,
        num_iterations=work.epochs,
        num_generations=work.samples,
        max_completion_length=work.response_tokens,
        learning_rate=work.learning_rate,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(work.model, dtype=torch.bfloat16),
        reward_funcs=reward_of(work),
        args=settings,
        train_dataset=Dataset.from_dict({"prompt": work.prompt_texts()}),
        processing_class=tokenizer,
        peft_config=peft_config,
    )
    trainer.eos_token_ids, trainer.generation_config.eos_token_id = [], None
    trainer.generation_kwargs["eos_token_id"] = None  # it would be put back before each generation
    trainer.model.generation_config.eos_token_id = None
    return trainer


def reward_of(work: GRPOWork) -> Callable[..., list[float]]:
    """Return the reward as TRL calls it; it exits with one line unless every response has the stated length."""

    def reward(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        lengths = {len(tokens) for tokens in completion_ids}
        if lengths != {work.response_tokens}:
            sys.exit(f"trl_grpo: responses of {sorted(lengths)} tokens, expected {work.response_tokens}")
        return vowels(completions)

    return reward


def measure(work: GRPOWork, trainer: GRPOTrainer) -> dict[str, Any]:
    """Run the steps; return medians."""
    torch.set_num_threads(work.threads)
    stopwatch = Stopwatch(work.epochs * work.mini_batches)
    trainer.add_callback(stopwatch)
    trainer._generate = stopwatch.watch(lambda *_: "actor_generate", trainer._generate)
    trainer._calculate_rewards = stopwatch.watch(lambda *_: "score", trainer._calculate_rewards)
    trainer._get_per_token_logps_and_entropies = stopwatch.watch(
        lambda *_: None if torch.is_grad_enabled() else "old_logprobs", trainer._get_per_token_logps_and_entropies
    )
    trainer.train()
    return {
        "seconds_per_step": stopwatch.median("step"),
        "seconds_per_call": {
            name: stopwatch.median(name) for name in ("actor_generate", "score", "old_logprobs", "train")
        },
        "details": {"steps": len(stopwatch.steps)},
    }


if __name__ == "__main__":
    asked = GRPOWork(**json.loads(sys.argv[1]))
    print(json.dumps(measure(asked, make_trainer(asked))))
