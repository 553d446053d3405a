"""Self-distillation: the policy learns from a frozen copy of itself, by the reverse KL at the sampled tokens.

The copy has a lower temperature, so the policy becomes more certain (Agarwal et al. 2023, arXiv:2306.13649, with the
reverse KL; Lu et al. 2025, "On-Policy Distillation", has this gradient).
"""

from prefect_rlhf import Batch, Computed, Model, Optimizer, Prompts, Sampling, Settings
from prefect_rlhf import computation, computations, compute, generate, inference, losses, rlhf_flow, train_step


class Distillation(Settings):
    """Settings of a run, under `algo`."""

    batch_size: int = 8
    copy_temperature: float = 0.7
    sampling: Sampling = Sampling(max_new_tokens=16)
    optimizer: Optimizer = Optimizer(lr=1e-5)


@computation("advantages")
def reverse_kl(rollout: Batch, copy: Batch, settings: Distillation) -> Computed:
    """Return the copy's log-probability of each sampled token minus the policy's: [B, T], in nats."""
    mask_BT = rollout.mask("logprobs")
    gain_BT = (copy["logprobs"] - rollout["logprobs"]) * mask_BT
    return Computed({"advantages": gain_BT}, metrics={"kl": -float(computations.masked_mean(gain_BT, mask_BT))})


@rlhf_flow("self-distillation")
def self_distillation(prompts: Prompts, actor: Model, ref: Model, algo: Distillation = Distillation()) -> None:
    """One iteration: sample responses, score them with the copy, and train towards it."""
    rollout = generate(actor, prompts, batch_size=algo.batch_size, sampling=algo.sampling)
    copy = inference(ref, rollout, output="logprobs", temperature=algo.copy_temperature)
    advantages = compute(reverse_kl, rollout, copy, settings=algo)
    loss = losses.policy_gradient(algo).on(rollout, advantages, temperature=algo.sampling.temperature)
    train_step(actor, loss, optimizer=algo.optimizer)
