"""An author's flow whose advantages are no numbers from the second step on."""

import math

import torch

from prefect_rlhf.blocks.dataset import Prompts
from prefect_rlhf.blocks.model import Model
from prefect_rlhf.engines.compute import Computed
from prefect_rlhf.flows.algorithm.rlhf_flow import rlhf_flow
from prefect_rlhf.tasks.rl.losses import policy_gradient
from prefect_rlhf.tasks.settings import Optimizer, Sampling, Settings
from prefect_rlhf.tasks.tracing.calls import compute, generate, train_step
from prefect_rlhf.tasks.tracing.operations import computation

ALGO = Settings()


@computation("advantages")
def no_numbers_later(rollout, settings, context):
    value = math.nan if context.step > 1 else 1.0
    return Computed({"advantages": torch.full_like(rollout["logprobs"], value)})


@rlhf_flow("turns_nan")
def turns_nan(prompts: Prompts, actor: Model, algo: Settings = ALGO) -> None:
    rollout = generate(actor, prompts, batch_size=4, sampling=Sampling(max_new_tokens=4))
    advantages = compute(no_numbers_later, rollout, settings=algo)
    train_step(actor, policy_gradient(algo).on(rollout, advantages), optimizer=Optimizer())
