"""TRL's half of `one_gpu.py`: GRPOTrainer with vLLM in the same process, at the work of ours; prints its findings.

Everything is set in its favour where there is a choice: weights, gradients and moments in bfloat16, no gradient
checkpointing, no reference, no correction for the sampler's log-probabilities (it costs a forward), vLLM awake always.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from statistics import fmean, median
from typing import Any

from benchmarks.one_card.child import NO_MEMORY, say
from benchmarks.one_card.memory import GIB
from benchmarks.one_card.work import Work

ONE_RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
IN_THIS_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # where TRL looks for the model of vLLM


def main() -> None:
    """Run the steps; print each as it ends."""
    work = Work.read(sys.argv[1])
    began = time.monotonic()
    for name, value in {**ONE_RANK, **IN_THIS_PROCESS, "MASTER_PORT": str(free_port())}.items():
        os.environ.setdefault(name, value)
    if work.kind == "cpu":
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    import torch

    try:
        trainer = make_trainer(work)
        say("trl built", seconds=round(time.monotonic() - began, 1), rows_at_once=work.trl_rows, **memory())
        stopwatch = watched(trainer)
        trainer.train()
    except torch.OutOfMemoryError as error:
        say("out of memory", rows_at_once=work.trl_rows, why=str(error).splitlines()[0][:300])
        sys.exit(NO_MEMORY)
    seconds = [step["step"] for step in stopwatch.steps[1:]]
    calls = {name: round(stopwatch.median(name), 4) for name in ("actor_generate", "score", "old_logprobs", "train")}
    say("calls", seconds=calls, steps=len(seconds))
    say("step seconds", seconds=median(seconds), mean=round(fmean(seconds), 4), each=seconds)
    tokens = work.rows * work.length / median(seconds)
    say(
        "utilisation",
        tokens_per_second=round(tokens, 1),
        response_tokens_per_second=round(tokens * work.response_tokens / work.length, 1),
    )


def free_port() -> int:
    """Return a port that nobody uses now."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port: int = free.getsockname()[1]
        return port


def make_trainer(work: Work) -> Any:
    """Make TRL's trainer, in which every response has all its tokens."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(work.model, padding_side="left")
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(1)
    rows = [json.loads(line) for line in work.prompts.read_text().splitlines()]
    settings = GRPOConfig(
        output_dir=f"{work.out}/trl",
        max_steps=work.steps,
        per_device_train_batch_size=work.trl_rows,
        gradient_accumulation_steps=work.rows // work.trl_rows,
        num_generations=work.samples,
        max_completion_length=work.response_tokens,
        temperature=1.0,
        beta=0.0,
        loss_type="grpo",
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        adam_beta2=0.95,  # as of ours
        bf16=False,  # the weights are bfloat16 themselves
        use_cpu=work.kind == "cpu",
        gradient_checkpointing=False,
        report_to="none",
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
        shuffle_dataset=False,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=work.trl_share,
        vllm_max_model_length=work.length,
        vllm_importance_sampling_correction=False,
        generation_kwargs={"ignore_eos": True},
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(work.model, dtype=torch.bfloat16),
        reward_funcs=reward_of(work),
        args=settings,
        train_dataset=Dataset.from_dict({"prompt": [row["prompt"] for row in rows if row["split"] == "train"]}),
        processing_class=tokenizer,
    )
    trainer.eos_token_ids = []
    if work.kind == "cpu":
        trainer.vllm_generation.sync_weights = lambda: say("weights not moved", why="vLLM on a CPU keeps packed copies")
    return trainer


def reward_of(work: Work) -> Any:
    """Return the reward as TRL calls it; it exits with a line unless every row has the stated lengths."""
    from benchmarks.one_card.reward import even

    def reward(prompts: list[str], completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        lengths = {len(tokens) for tokens in completion_ids}
        if lengths != {work.response_tokens} or len(completions) != work.rows:
            sys.exit(
                f"trl: {len(completions)} responses of {sorted(lengths)} tokens, expected {work.rows} of "
                f"{work.response_tokens}"
            )
        return even(completions)

    return reward


def watched(trainer: Any) -> Any:
    """Time the parts of each step, and print each step as it ends."""
    import torch

    from benchmarks.beside_trl.trl_stopwatch import Stopwatch

    def wait() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    class Watch(Stopwatch):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            wait()
            super().on_step_end(*args, **kwargs)
            step = {name: round(seconds, 4) for name, seconds in self.steps[-1].items()}
            self.steps[-1] = step
            say("step", step=len(self.steps), seconds=step["step"], working=step, **memory())

    def synchronised(function: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            found = function(*arguments, **named)
            wait()
            return found

        return call

    stopwatch = Watch()
    trainer.add_callback(stopwatch)
    trainer._generate = stopwatch.watch(lambda *_: "actor_generate", synchronised(trainer._generate))
    trainer._calculate_rewards = stopwatch.watch(lambda *_: "score", synchronised(trainer._calculate_rewards))
    trainer._get_per_token_logps_and_entropies = stopwatch.watch(
        lambda *_: None if torch.is_grad_enabled() else "old_logprobs", trainer._get_per_token_logps_and_entropies
    )
    return stopwatch


def memory() -> dict[str, float]:
    """Return the most that torch held, and what the driver counts now, in GiB."""
    import torch

    if not torch.cuda.is_available():
        return {}
    free, total = torch.cuda.mem_get_info()
    return {
        "allocated_gib": round(torch.cuda.max_memory_allocated() / GIB, 3),
        "reserved_gib": round(torch.cuda.max_memory_reserved() / GIB, 3),
        "used_gib": round((total - free) / GIB, 3),
    }


if __name__ == "__main__":
    main()
