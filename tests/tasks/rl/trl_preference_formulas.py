"""Formulas of TRL 1.16.0 (Apache-2.0, Copyright 2020-2026 The HuggingFace Team), to compare ours with.

Copied from trl-1.16.0-py3-none-any.whl: trl/trainer/dpo_trainer.py, trl/trainer/kto_trainer.py and
trl/experimental/cpo/cpo_trainer.py, as each function says. Changed: attributes of trainers became arguments, one
process, log-ratios are given in place of forward passes, and metrics were left out.
"""

import torch
import torch.nn.functional as F


def dpo_loss(chosen_scores, rejected_scores, chosen_mask, rejected_mask, loss_type, beta, label_smoothing):
    """trl/trainer/dpo_trainer.py, _compute_loss; `sigmoid_smoothed` is "sigmoid" of cpo_trainer.py, cpo_loss"""
    delta_score = chosen_scores - rejected_scores
    if loss_type == "sigmoid":
        per_sequence_loss = -F.logsigmoid(beta * delta_score)
    elif loss_type == "sigmoid_smoothed":
        per_sequence_loss = (
            -F.logsigmoid(beta * delta_score) * (1 - label_smoothing)
            - F.logsigmoid(-beta * delta_score) * label_smoothing
        )
    elif loss_type == "ipo":
        chosen_avg_score = chosen_scores / chosen_mask.sum(dim=1).clamp(min=1.0)
        rejected_avg_score = rejected_scores / rejected_mask.sum(dim=1).clamp(min=1.0)
        ipo_delta = chosen_avg_score - rejected_avg_score
        per_sequence_loss = (ipo_delta - 1 / (2 * beta)) ** 2
    elif loss_type == "robust":
        clean_loss_term = -(1 - label_smoothing) * F.logsigmoid(beta * delta_score)
        flipped_loss_term = -label_smoothing * F.logsigmoid(-beta * delta_score)
        per_sequence_loss = (clean_loss_term - flipped_loss_term) / (1 - 2 * label_smoothing)
    return per_sequence_loss.mean()


def simpo_loss(policy_chosen_logps, policy_rejected_logps, beta, simpo_gamma, label_smoothing):
    """trl/experimental/cpo/cpo_trainer.py, cpo_loss, on log-probabilities averaged over tokens"""
    logits = policy_chosen_logps - policy_rejected_logps
    gamma_logratios = simpo_gamma / beta
    logits = logits - gamma_logratios
    losses = -F.logsigmoid(beta * logits) * (1 - label_smoothing) - F.logsigmoid(-beta * logits) * label_smoothing
    return losses.mean()


def kl_completions(completions):
    """trl/trainer/kto_trainer.py, DataCollatorForVisionUnpairedPreference.torch_call"""
    return completions[-1:] + completions[:-1]


def kto_loss(logps, ref_logps, label, KL_logps, ref_KL_logps, beta, desirable_weight, undesirable_weight):  # noqa: N803  its names
    """trl/trainer/kto_trainer.py, _compute_loss"""
    kl = (KL_logps - ref_KL_logps).mean().detach()
    kl = kl.clamp(min=0)
    bool_labels = torch.as_tensor(label, dtype=torch.bool)
    chosen_idx = torch.nonzero(bool_labels, as_tuple=False).view(-1)
    rejected_idx = torch.nonzero(~bool_labels, as_tuple=False).view(-1)
    chosen_logratios = logps.index_select(0, chosen_idx) - ref_logps.index_select(0, chosen_idx)
    chosen_losses = 1 - F.sigmoid(beta * (chosen_logratios - kl))
    rejected_logratios = logps.index_select(0, rejected_idx) - ref_logps.index_select(0, rejected_idx)
    rejected_losses = 1 - F.sigmoid(beta * (kl - rejected_logratios))
    losses = torch.cat((desirable_weight * chosen_losses, undesirable_weight * rejected_losses), 0)
    return losses.mean()
