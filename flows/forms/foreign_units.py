"""Arithmetic for options of TRL, verl and OpenRLHF whose unit differs from our parameter.

A name on the right side of `=` is an option of theirs, a parameter here, `devices`, the `dp` or `replicas` of a call,
or `response_tokens`, the mean length of a response.
"""

from collections.abc import Mapping
from types import MappingProxyType

_UPDATES = "algo.update.mini_batches * algo.update.epochs"
_RATIO = f"* steps * {_UPDATES}"
_MEASURED_IN_UPDATES = f"/ ({_UPDATES}): TRL counts optimizer steps"
_MEASURED_IN_STEPS = f"* {_UPDATES}: verl counts steps, of several optimizer steps each"

UNITS: Mapping[str, str] = MappingProxyType(
    {
        "generation_batch_size": "algo.batch_size = generation_batch_size / num_generations: TRL counts responses",
        "per_device_train_batch_size": (
            "algo.batch_size = per_device_train_batch_size * gradient_accumulation_steps * devices of SFT and DPO; of "
            "GRPO algo.batch_size = per_device_train_batch_size * steps_per_generation * devices / num_generations"
        ),
        "gradient_accumulation_steps": (
            "algo.batch_size = per_device_train_batch_size * gradient_accumulation_steps * devices of SFT and DPO; of "
            "GRPO algo.update.mini_batches = steps_per_generation / gradient_accumulation_steps"
        ),
        "steps_per_generation": "algo.update.mini_batches = steps_per_generation / gradient_accumulation_steps",
        "max_steps": f"steps = max_steps {_MEASURED_IN_UPDATES}",
        "eval_steps": f"algo.evaluate_every = eval_steps {_MEASURED_IN_UPDATES}",
        "save_steps": f"checkpoint_every = save_steps {_MEASURED_IN_UPDATES}",
        "max_tool_calling_iterations": "play.max_turns = max_tool_calling_iterations + 1: TRL counts rounds of calls",
        "warmup_steps": f"below 1: algo.optimizer.warmup_steps = warmup_steps {_RATIO}",
        "warmup_ratio": f"algo.optimizer.warmup_steps = warmup_ratio {_RATIO}",
        "ppo_mini_batch_size": "algo.update.mini_batches = data.train_batch_size / ppo_mini_batch_size",
        "ppo_micro_batch_size_per_gpu": (
            "micro_batches = ppo_mini_batch_size * rollout.n / (dp * ppo_micro_batch_size_per_gpu)"
        ),
        "optim.total_training_steps": (f"algo.optimizer.decay_steps = optim.total_training_steps {_MEASURED_IN_STEPS}"),
        "optim.lr_decay_steps": f"algo.optimizer.decay_steps = optim.lr_decay_steps {_MEASURED_IN_STEPS}",
        "optim.lr_warmup_steps": f"algo.optimizer.warmup_steps = optim.lr_warmup_steps {_MEASURED_IN_STEPS}",
        "lr_warmup_steps_ratio": f"algo.optimizer.warmup_steps = lr_warmup_steps_ratio {_RATIO}",
        "rollout.ignore_eos": "algo.sampling.stop_at_eos is its opposite",
        "rollout.top_k": "algo.sampling.top_k: 0 is what verl writes as -1",
        "multi_turn.max_tool_response_length": (
            "play.max_answer_tokens = multi_turn.max_tool_response_length / 4, about: verl counts characters"
        ),
        "agent.num_workers": "play.workers = agent.num_workers / replicas",
        "algorithm.filter_groups": "algo.over_sampling = data.gen_batch_size / data.train_batch_size",
        "train_batch_size": ("algo.update.mini_batches = rollout_batch_size * n_samples_per_prompt / train_batch_size"),
        "micro_train_batch_size": "micro_batches = train_batch_size / (dp * micro_train_batch_size)",
        "micro_rollout_batch_size": (
            "micro_batches = rollout_batch_size * n_samples_per_prompt / (dp * micro_rollout_batch_size)"
        ),
        "lr_warmup_ratio": f"algo.optimizer.warmup_steps = lr_warmup_ratio {_RATIO}",
        "target_kl": "algo.kl.target = target_kl * response_tokens: verl has a mean over tokens, we have a sum",
        "kl_target": "algo.kl.target = kl_target * response_tokens: OpenRLHF has a mean over tokens, we have a sum",
        "dynamic_filtering": "algo.over_sampling: above 1 if true",
        "trainer.v1.separate_async": "staleness: 1 if true",
        "async_train": "staleness: 1 if true",
    }
)
"""The arithmetic by option, as the page and the messages state it."""
