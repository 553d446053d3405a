"""SAPO (Gao et al. 2025, arXiv:2511.20347): a soft gate on each token's ratio in place of GRPO's clip."""

from collections.abc import Mapping
from typing import Any

from prefect_rlhf import GRPO, LossValues, Model, Prompts, Reward
from prefect_rlhf import computations, compute, generate, loss, rlhf_flow, score, train_step


class SAPO(GRPO):
    """Settings of GRPO, and the sharpness of the gate for tokens with positive and with negative advantage."""

    tau_positive: float = 1.0
    tau_negative: float = 1.05


@loss("logprobs")
def soft_gate(logprobs_BT: Any, batch: Mapping[str, Any], settings: SAPO) -> LossValues:
    """Minus the advantage times 4 / tau * sigmoid(tau * (ratio - 1)): slope 1 at ratio 1, and smaller elsewhere."""
    advantages_BT, ratio_BT = batch["advantages"], (logprobs_BT - batch["logprobs"]).exp()
    gains_BT = (advantages_BT > 0).float()
    tau_BT = settings.tau_positive * gains_BT + settings.tau_negative * (1 - gains_BT)
    gate_BT = 4 / tau_BT * (tau_BT * (ratio_BT - 1)).sigmoid()
    return LossValues(-gate_BT * advantages_BT, {"ratio": ratio_BT, "entropy": -logprobs_BT})


@rlhf_flow("sapo")
def sapo(prompts: Prompts, actor: Model, reward: Reward, algo: SAPO = SAPO()) -> None:
    """One iteration: sample groups of responses, compare each with its group, and train with the soft gate."""
    size, group = algo.batch_size, algo.samples_per_prompt
    rollout = generate(actor, prompts, batch_size=size, samples=group, sampling=algo.sampling)
    scores = score(reward, rollout)
    advantages = compute(computations.grpo_advantages, rollout, scores, settings=algo)
    gated = soft_gate(algo).on(rollout, advantages, temperature=algo.temperature)
    train_step(actor, gated, optimizer=algo.optimizer, update=algo.update)
