"""Losses on existing answers: pairs of a better and a worse answer, or single answers labelled good or bad.

Shapes: B rows, T response tokens, P pairs (row 2p chosen, 2p+1 rejected).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from prefect_rlhf.engines.losses.protocol import LossValues
from prefect_rlhf.tasks.rl.losses import REF_LOGPROBS, log_sigmoid
from prefect_rlhf.tasks.rl.masked import row_means, row_sums
from prefect_rlhf.tasks.rl.settings.offline import DPO, KTO
from prefect_rlhf.tasks.tracing.operations import loss

if TYPE_CHECKING:
    from torch import Tensor


@loss("logprobs", rows_per_item=2)
def dpo(logprobs_BT: Tensor, batch: Mapping[str, Tensor], settings: DPO) -> LossValues:
    """The loss for DPO and its variants. m is how much higher the chosen answer's `implicit_rewards` are than the
    rejected answer's.

    - dpo: -log sigmoid(m). Rafailov et al. 2023 (arXiv:2305.18290), equation 7.
    - cdpo: -(1 - e) log sigmoid(m) - e log sigmoid(-m); e is the share of wrong labels. Mitchell 2023.
    - robust: the same with minus e, divided by 1 - 2e; its mean is the loss of correct labels. Chowdhury et al. 2024
      (arXiv:2403.00409), "Robust DPO".
    - ipo: (m / beta - 1 / (2 beta))^2. Azar et al. 2023 (arXiv:2310.12036), on means over tokens as in TRL.
    - simpo: -log sigmoid(m - margin). Meng et al. 2024 (arXiv:2405.14734), "The SimPO Objective".
    """
    reference_BT = batch[REF_LOGPROBS] if settings.needs_reference else None
    rewards_B = implicit_rewards(logprobs_BT, reference_BT, batch["mask"], settings)
    chosen_P, rejected_P = rewards_B[0::2], rewards_B[1::2]
    margins_P = chosen_P - rejected_P
    right_P, wrong_P = log_sigmoid(margins_P - settings.target_margin), log_sigmoid(-margins_P)
    wrong = settings.label_smoothing
    if settings.loss == "ipo":
        losses_P = (margins_P / settings.strength - 1 / (2 * settings.strength)).square()
    elif settings.loss == "robust":
        losses_P = -((1 - wrong) * right_P - wrong * wrong_P) / (1 - 2 * wrong)
    else:
        losses_P = -(1 - wrong) * right_P - wrong * wrong_P
    accuracy_P = (margins_P > 0).float() + 0.5 * (margins_P == 0).float()
    metrics = {"accuracy": accuracy_P, "margin": margins_P, "chosen_reward": chosen_P, "rejected_reward": rejected_P}
    return LossValues(losses_P, metrics)


def implicit_rewards(logprobs_BT: Tensor, reference_BT: Tensor | None, mask_BT: Tensor, settings: DPO) -> Tensor:
    """Return [B]: beta times each answer's log-ratio of policy to reference; for ipo, its mean over tokens.

    Simpo has no reference: its reward is beta times the mean log-probability.
    """
    gain_BT = logprobs_BT if reference_BT is None else logprobs_BT - reference_BT
    per_row = row_means if settings.loss in ("ipo", "simpo") else row_sums
    return settings.strength * per_row(gain_BT, mask_BT)


@loss("logprobs")
def kto(logprobs_BT: Tensor, batch: Mapping[str, Tensor], settings: KTO) -> LossValues:
    """The KTO loss (Ethayarajh et al. 2024, arXiv:2402.01306).

    It is 1 - sigmoid(beta (r - z)) for a good answer and 1 - sigmoid(beta (z - r)) for a bad answer, times the weight
    for good or bad answers. r is the log-ratio of policy to reference, and z (`kl`) its mean over mismatched answers.
    """
    gain_B = row_sums(logprobs_BT - batch[REF_LOGPROBS], batch["mask"])
    is_good_B = batch["label"] > 0
    sign_B = is_good_B.to(gain_B) * 2 - 1
    weight_B = is_good_B.to(gain_B) * (settings.good_weight - settings.bad_weight) + settings.bad_weight
    ahead_B = settings.beta * (gain_B - batch["kl"].to(gain_B))
    values_B = weight_B * (1 - (sign_B * ahead_B).sigmoid())
    right_B = (sign_B * ahead_B > 0).float() + 0.5 * (ahead_B == 0).float()
    return LossValues(values_B, {"accuracy": right_B, "reward": settings.beta * gain_B, "kl": batch["kl"]})
