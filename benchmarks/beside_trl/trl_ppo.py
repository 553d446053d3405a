"""TRL's PPOTrainer at the work of `ppo_work.py`, in a process of its own: prints what it measured as JSON.

TRL 1.12 is the last release with PPOTrainer. Everything is set in its favour where there is a choice: weights of all
four models and the optimizer's moments in bfloat16 (no autocast, no float32 main weights), one micro-batch per
mini-batch, no evaluation, no checkpoints, no logging to a tracker.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

from benchmarks.beside_trl.ppo_work import PPOWork
from benchmarks.beside_trl.trl_stopwatch import Stopwatch


def make_trainer(work: PPOWork) -> PPOTrainer:
    """Make TRL's trainer with four models of the same folder."""
    tokenizer = AutoTokenizer.from_pretrained(work.model, padding_side="left")
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)  # must not be the token that ends a response
    policy, ref = (AutoModelForCausalLM.from_pretrained(work.model, dtype=torch.bfloat16) for _ in range(2))
    value, reward = (
        AutoModelForSequenceClassification.from_pretrained(work.model, num_labels=1, dtype=torch.bfloat16)
        for _ in range(2)
    )
    prompts = Dataset.from_list([{"input_ids": tokenizer(text)["input_ids"]} for text in work.prompt_texts()])
    settings = PPOConfig(
        output_dir=".rlhf/benchmarks/trl",
        total_episodes=work.batch_size * (work.steps + 1),
        per_device_train_batch_size=work.batch_size,  # with 1 accumulation: one optimizer step a mini-batch
        gradient_accumulation_steps=1,
        num_mini_batches=work.mini_batches,
        num_ppo_epochs=work.epochs,
        local_rollout_forward_batch_size=work.batch_size,
        response_length=work.response_tokens,
        stop_token=None,
        temperature=1.0,
        kl_coef=work.kl_coefficient,
        learning_rate=work.learning_rate,
        num_sample_generations=0,
        bf16=False,  # the weights are bfloat16 themselves
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        eval_strategy="no",
        disable_tqdm=True,
        gradient_checkpointing=False,
    )
    return PPOTrainer(
        args=settings,
        processing_class=tokenizer,
        model=policy,
        ref_model=ref,
        reward_model=reward,
        value_model=value,
        train_dataset=prompts,
        eval_dataset=prompts.select(range(work.batch_size)),
    )


def measure(work: PPOWork) -> dict[str, Any]:
    """Run the steps; return medians."""
    torch.set_num_threads(work.threads)
    trainer, stopwatch = make_trainer(work), Stopwatch()
    trainer.add_callback(stopwatch)
    scored = {id(trainer.value_model): "critic_inference", id(trainer.reward_model): "reward_inference"}
    ppo_trainer.batch_generation = stopwatch.watch(lambda _: "actor_generate", ppo_trainer.batch_generation)
    ppo_trainer.get_reward = stopwatch.watch(lambda model: scored[id(model)], ppo_trainer.get_reward)
    ppo_trainer.forward = stopwatch.watch(
        lambda model: "ref_inference" if model is trainer.ref_model else None, ppo_trainer.forward
    )
    trainer.train()
    calls = ("actor_generate", "reward_inference", "ref_inference", "critic_inference", "train")
    return {
        "seconds_per_step": stopwatch.median("step"),
        "seconds_per_call": {name: stopwatch.median(name) for name in calls},
        "details": {"steps": len(stopwatch.steps)},
    }


if __name__ == "__main__":
    print(json.dumps(measure(PPOWork(**json.loads(sys.argv[1])))))
