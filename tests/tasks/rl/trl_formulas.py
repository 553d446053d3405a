"""Formulas of TRL 1.16.0 (Apache-2.0, Copyright 2020-2026 The HuggingFace Team), to compare ours with.

Copied from trl-1.16.0-py3-none-any.whl: trl/trainer/grpo_trainer.py, trl/trainer/rloo_trainer.py, trl/trainer/utils.py
and trl/rewards/other_rewards.py, as each function says. Changed: attributes of trainers became arguments, one process
and one micro-batch, and metrics were left out.
"""

import math

import torch


def nanstd(tensor, dim=None, keepdim=False):
    """trl/trainer/utils.py, nanstd"""
    mean = torch.nanmean(tensor, dim=dim, keepdim=True)
    variance = torch.nanmean((tensor - mean) ** 2, dim=dim, keepdim=True)
    count = torch.sum(~torch.isnan(tensor), dim=dim, keepdim=True)
    correction = count / (count - 1)
    correction = torch.where(count > 1, correction, torch.full_like(correction, float("nan")))
    variance *= correction
    std = torch.sqrt(variance)
    return std if keepdim else std.squeeze(dim) if dim is not None else std.squeeze()


def grpo_advantages(rewards, num_generations, scale_rewards):
    """trl/trainer/grpo_trainer.py, _generate_and_score_completions, "sum_then_normalize" """
    mean_grouped_rewards = torch.nanmean(rewards.view(-1, num_generations), dim=1)
    mean_grouped_rewards = mean_grouped_rewards.repeat_interleave(num_generations, dim=0)
    std_rewards = nanstd(rewards.view(-1, num_generations), dim=1)
    std_rewards = std_rewards.repeat_interleave(num_generations, dim=0)
    advantages = rewards - mean_grouped_rewards
    if scale_rewards != "none":
        advantages = advantages / (std_rewards + 1e-4)
    return torch.nan_to_num(advantages, nan=0.0)


def gdpo_advantages(rewards_per_func, reward_weights, num_generations):
    """trl/trainer/grpo_trainer.py, _generate_and_score_completions, "normalize_then_sum" """
    unscorable_mask = torch.isnan(rewards_per_func).all(dim=1)
    grouped = rewards_per_func.view(-1, num_generations, rewards_per_func.shape[1])
    mean_k = torch.nanmean(grouped, dim=1, keepdim=True)
    std_k = nanstd(grouped, dim=1, keepdim=True) if num_generations > 1 else torch.zeros_like(mean_k)
    reward_k = (grouped - mean_k) / (std_k + 1e-4)
    reward_k = reward_k.view(-1, rewards_per_func.shape[1])
    rewards = (reward_k * reward_weights.unsqueeze(0)).nansum(dim=1)
    rewards[unscorable_mask] = torch.nan
    std_rewards = nanstd(rewards).expand_as(rewards) if rewards.numel() > 1 else torch.zeros_like(rewards)
    advantages = (rewards - torch.nanmean(rewards)) / (std_rewards + 1e-4)
    return torch.nan_to_num(advantages, nan=0.0)


def rloo_advantages(rewards, num_generations, per_token_kl, completion_mask, beta):
    """trl/trainer/rloo_trainer.py, _generate_and_score_completions"""
    if beta != 0.0:
        kl = (per_token_kl * completion_mask).sum(-1)
        rewards = rewards - beta * kl
    grouped_rewards = rewards.view(-1, num_generations)
    scorable_counts = (~torch.isnan(grouped_rewards)).sum(dim=1, keepdim=True)
    grouped_sum = torch.nansum(grouped_rewards, dim=1, keepdim=True)
    baselines = (grouped_sum - grouped_rewards) / (scorable_counts - 1)
    baselines = baselines.view(-1)
    advantages = rewards - baselines
    return torch.nan_to_num(advantages, nan=0.0)


def grpo_loss(  # noqa: C901  as it stands there
    inputs, per_token_logps, loss_type, importance_sampling_level, epsilon_low, epsilon_high, beta, longest
):
    """trl/trainer/grpo_trainer.py, _compute_loss"""
    mask, advantages = inputs["mask"], inputs["advantages"]
    log_ratio = per_token_logps - inputs["old_per_token_logps"]
    if importance_sampling_level == "token":
        log_importance_weights = log_ratio
    elif importance_sampling_level == "sequence":
        log_importance_weights = (log_ratio * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)
        log_importance_weights = log_importance_weights.unsqueeze(-1)
    coef_1 = torch.exp(log_importance_weights)
    if beta != 0.0:
        ref_per_token_logps = inputs["ref_per_token_logps"]
        per_token_kl = torch.exp(ref_per_token_logps - per_token_logps) - (ref_per_token_logps - per_token_logps) - 1
    if loss_type == "cispo":
        clamped_ratios = torch.clamp(coef_1, max=epsilon_high).detach()
        per_token_loss = -clamped_ratios * advantages * per_token_logps
    elif loss_type in ["grpo", "bnpo", "dr_grpo", "dapo", "luspo"]:
        coef_2 = torch.clamp(coef_1, 1 - epsilon_low, 1 + epsilon_high)
        per_token_loss1 = coef_1 * advantages
        per_token_loss2 = coef_2 * advantages
        per_token_loss = -torch.min(per_token_loss1, per_token_loss2)
    if "importance_sampling_ratio" in inputs:
        per_token_loss = per_token_loss * inputs["importance_sampling_ratio"]
    if beta != 0.0:
        per_token_loss = per_token_loss + beta * per_token_kl
    if loss_type in ["grpo", "sapo"]:
        loss = ((per_token_loss * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()
    elif loss_type == "dr_grpo":
        loss = (per_token_loss * mask).sum() / (per_token_loss.size(0) * longest)
    elif loss_type in ["cispo", "dapo", "vespo"]:
        normalizer = mask.sum().clamp(min=1.0)  # inputs["num_items_in_batch"]
        loss = (per_token_loss * mask).sum() / normalizer
    return loss


def vllm_importance_sampling_ratio(old_per_token_logps, sampling_per_token_logps, mask, mode, clip_min, clip_max):
    """trl/trainer/grpo_trainer.py, _generate_and_score_completions"""
    per_token_logps_diff = (old_per_token_logps - sampling_per_token_logps) * mask
    per_token_logps_diff = torch.nan_to_num(per_token_logps_diff, nan=0.0)
    sequence_level_is = mode in ["sequence_mask", "sequence_truncate"]
    logps_diff = per_token_logps_diff.sum(dim=-1, keepdim=True) if sequence_level_is else per_token_logps_diff
    vllm_importance_sampling_ratio = torch.exp(logps_diff)
    if mode in ["sequence_truncate", "token_truncate"]:
        return torch.clamp(vllm_importance_sampling_ratio, min=clip_min, max=clip_max)
    min_val = clip_min if clip_min is not None else -math.inf
    max_val = clip_max if clip_max is not None else math.inf
    invalid_mis_mask = (vllm_importance_sampling_ratio < min_val) | (vllm_importance_sampling_ratio > max_val)
    return vllm_importance_sampling_ratio.masked_fill(invalid_mis_mask, value=0.0)


def soft_overlong_punishment(completion_length, max_completion_len, soft_punish_cache):
    """trl/rewards/other_rewards.py, get_soft_overlong_punishment"""
    if completion_length <= max_completion_len - soft_punish_cache:
        return 0.0
    if max_completion_len - soft_punish_cache < completion_length <= max_completion_len:
        return (max_completion_len - soft_punish_cache - completion_length) / soft_punish_cache
    return -1.0
