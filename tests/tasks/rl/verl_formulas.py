"""Formulas of verl 0.9.1 (Apache-2.0, Copyright 2024 Bytedance Ltd. and/or its affiliates), to compare ours with.

Copied from verl-0.9.1-py3-none-any.whl: verl/trainer/ppo/core_algos.py, verl/utils/torch_functional.py and
verl/trainer/ppo/rollout_corr_helper.py, as each function says. Changed: configs became arguments, and metrics were left
out.
"""

from collections import defaultdict

import torch

SAFETY_BOUND = 20.0


def masked_sum(values, mask, axis=None):
    """verl/utils/torch_functional.py, masked_sum"""
    valid_values = torch.where(mask.bool(), values, 0.0)
    return (valid_values * mask).sum(axis=axis)


def masked_mean(values, mask, axis=None):
    """verl/utils/torch_functional.py, masked_mean"""
    s = masked_sum(values, mask, axis)
    return s / (mask.sum(axis=axis) + 1e-8)


def masked_var(values, mask):
    """verl/utils/torch_functional.py, masked_var"""
    mean = masked_mean(values, mask)
    centered_values = values - mean
    variance = masked_mean(centered_values**2, mask)
    mask_sum = mask.sum()
    bessel_correction = mask_sum / (mask_sum - 1)
    return variance * bessel_correction


def masked_whiten(values, mask):
    """verl/utils/torch_functional.py, masked_whiten"""
    mean, var = masked_mean(values, mask), masked_var(values, mask)
    return (values - mean) * torch.rsqrt(var + 1e-8)


def compute_grpo_outcome_advantage(
    token_level_rewards, response_mask, index, epsilon=1e-6, norm_adv_by_std_in_grpo=True
):
    """verl/trainer/ppo/core_algos.py, compute_grpo_outcome_advantage"""
    scores = token_level_rewards.sum(dim=-1)
    id2score, id2mean, id2std = defaultdict(list), {}, {}
    bsz = scores.shape[0]
    for i in range(bsz):
        id2score[index[i]].append(scores[i])
    for idx in id2score:
        if len(id2score[idx]) == 1:
            id2mean[idx] = torch.tensor(0.0)
            id2std[idx] = torch.tensor(1.0)
        elif len(id2score[idx]) > 1:
            scores_tensor = torch.stack(id2score[idx])
            id2mean[idx] = torch.mean(scores_tensor)
            id2std[idx] = torch.std(scores_tensor)
    for i in range(bsz):
        if norm_adv_by_std_in_grpo:
            scores[i] = (scores[i] - id2mean[index[i]]) / (id2std[index[i]] + epsilon)
        else:
            scores[i] = scores[i] - id2mean[index[i]]
    return scores.unsqueeze(-1) * response_mask


def compute_reinforce_plus_plus_baseline_outcome_advantage(token_level_rewards, response_mask, index):
    """verl/trainer/ppo/core_algos.py, compute_reinforce_plus_plus_baseline_outcome_advantage"""
    response_length = token_level_rewards.shape[-1]
    scores = token_level_rewards.sum(dim=-1)
    id2score, id2mean = defaultdict(list), {}
    bsz = scores.shape[0]
    for i in range(bsz):
        id2score[index[i]].append(scores[i])
    for idx in id2score:
        if len(id2score[idx]) == 1:
            id2mean[idx] = torch.tensor(0.0)
        elif len(id2score[idx]) > 1:
            id2mean[idx] = torch.mean(torch.stack(id2score[idx]))
    for i in range(bsz):
        scores[i] = scores[i] - id2mean[index[i]]
    scores = scores.unsqueeze(-1).tile([1, response_length]) * response_mask
    return masked_whiten(scores, response_mask) * response_mask


def compute_rloo_outcome_advantage(token_level_rewards, response_mask, index):
    """verl/trainer/ppo/core_algos.py, compute_rloo_outcome_advantage"""
    scores = token_level_rewards.sum(dim=-1)
    id2score, id2mean = defaultdict(list), {}
    bsz = scores.shape[0]
    for i in range(bsz):
        id2score[index[i]].append(scores[i])
    for idx in id2score:
        if len(id2score[idx]) == 1:
            id2mean[idx] = torch.tensor(0.0)
        elif len(id2score[idx]) > 1:
            id2mean[idx] = torch.mean(torch.stack(id2score[idx]))
    for i in range(bsz):
        response_num = len(id2score[index[i]])
        if response_num > 1:
            scores[i] = scores[i] * response_num / (response_num - 1) - id2mean[index[i]] * response_num / (
                response_num - 1
            )
    return scores.unsqueeze(-1) * response_mask


def compute_reinforce_plus_plus_outcome_advantage(token_level_rewards, response_mask, gamma):
    """verl/trainer/ppo/core_algos.py, compute_reinforce_plus_plus_outcome_advantage"""
    returns = torch.zeros_like(token_level_rewards)
    running_return = 0
    for t in reversed(range(token_level_rewards.shape[1])):
        new_running_return = token_level_rewards[:, t] + gamma * running_return
        returns[:, t] = new_running_return * response_mask[:, t]
        running_return = new_running_return * response_mask[:, t] + running_return * (1 - response_mask[:, t])
    return masked_whiten(returns, response_mask) * response_mask


def compute_rewards(token_level_scores, old_log_prob, ref_log_prob, kl_ratio):
    """verl/trainer/ppo/core_algos.py, compute_rewards"""
    kl = old_log_prob - ref_log_prob
    return token_level_scores - kl * kl_ratio


def agg_loss(loss_mat, loss_mask, loss_agg_mode, loss_scale_factor=None):
    """verl/trainer/ppo/core_algos.py, agg_loss, with dp_size 1"""
    if loss_agg_mode == "token-mean":
        loss = masked_sum(loss_mat, loss_mask) / loss_mask.sum()
    elif loss_agg_mode == "seq-mean-token-sum-norm":
        seq_losses = torch.sum(loss_mat * loss_mask, dim=-1)
        seq_mask = (torch.sum(loss_mask, dim=-1) > 0).float()
        loss = masked_sum(seq_losses, seq_mask) / seq_mask.sum()
        loss /= loss_scale_factor
    elif loss_agg_mode == "seq-mean-token-mean":
        seq_mask = torch.sum(loss_mask, dim=-1)
        seq_losses = torch.sum(loss_mat * loss_mask, dim=-1) / (seq_mask + 1e-8)
        seq_mask = (seq_mask > 0).float()
        loss = masked_sum(seq_losses, seq_mask) / seq_mask.sum()
    return loss


def compute_policy_loss_gspo(log_prob, old_log_prob, advantages, response_mask, clip_ratio_low, clip_ratio_high):
    """verl/trainer/ppo/core_algos.py, compute_policy_loss_gspo, before agg_loss"""
    negative_approx_kl = log_prob - old_log_prob
    seq_lengths = torch.sum(response_mask, dim=-1).clamp(min=1)
    negative_approx_kl_seq = torch.sum(negative_approx_kl * response_mask, dim=-1) / seq_lengths
    log_seq_importance_ratio = log_prob - log_prob.detach() + negative_approx_kl_seq.detach().unsqueeze(-1)
    log_seq_importance_ratio = torch.clamp(log_seq_importance_ratio, max=10.0)
    seq_importance_ratio = torch.exp(log_seq_importance_ratio)
    pg_losses1 = -advantages * seq_importance_ratio
    pg_losses2 = -advantages * torch.clamp(seq_importance_ratio, 1 - clip_ratio_low, 1 + clip_ratio_high)
    return torch.maximum(pg_losses1, pg_losses2)


def compute_policy_loss_cispo(log_prob, old_log_prob, advantages, clip_ratio_low, clip_ratio_high):
    """verl/trainer/ppo/core_algos.py, compute_policy_loss_cispo, before agg_loss"""
    negative_approx_kl = log_prob - old_log_prob
    negative_approx_kl = torch.clamp(negative_approx_kl, min=-20.0, max=20.0)
    ratio = torch.exp(negative_approx_kl)
    clipped_ratio = torch.clamp(ratio, 1 - clip_ratio_low, 1 + clip_ratio_high)
    clipped_ratio_sg = clipped_ratio.detach()
    return -clipped_ratio_sg * advantages * log_prob


def kl_penalty_forward(logprob, ref_logprob, kl_penalty):
    """verl/trainer/ppo/core_algos.py, kl_penalty_forward"""
    if kl_penalty in ("kl", "k1"):
        return logprob - ref_logprob
    if kl_penalty in ("mse", "k2"):
        return 0.5 * (logprob - ref_logprob).square()
    kl = ref_logprob - logprob
    kl = torch.clamp(kl, min=-20, max=20)
    ratio = torch.exp(kl)
    kld = (ratio - kl - 1).contiguous()
    return torch.clamp(kld, min=-10, max=10)


def compute_rollout_correction_weights(log_ratio, response_mask, rollout_is, upper, lower=None):
    """verl/trainer/ppo/rollout_corr_helper.py, compute_rollout_correction_weights"""
    if rollout_is == "token":
        log_ratio_safe = torch.clamp(log_ratio, min=-SAFETY_BOUND, max=SAFETY_BOUND)
        raw_rollout_is_weights = torch.exp(log_ratio_safe)
    elif rollout_is == "sequence":
        log_ratio_sum = masked_sum(log_ratio, response_mask, axis=-1).unsqueeze(-1)
        log_ratio_sum_safe = torch.clamp(log_ratio_sum, min=-SAFETY_BOUND, max=SAFETY_BOUND)
        raw_rollout_is_weights = torch.exp(log_ratio_sum_safe).expand_as(log_ratio)
    raw_rollout_is_weights = raw_rollout_is_weights * response_mask
    if lower is None:
        return raw_rollout_is_weights.clamp(max=upper)
    token_kept_mask = (raw_rollout_is_weights >= lower) & (raw_rollout_is_weights <= upper)
    return torch.where(token_kept_mask, raw_rollout_is_weights, torch.zeros_like(raw_rollout_is_weights))


def compute_offpolicy_metrics(old_log_prob, rollout_log_prob, response_mask):
    """verl/trainer/ppo/rollout_corr_helper.py, compute_offpolicy_metrics: k3_kl and chi2_token"""
    log_ratio = old_log_prob - rollout_log_prob
    k3_kl_matrix = torch.exp(log_ratio) - log_ratio - 1
    k3_kl = masked_mean(k3_kl_matrix, response_mask)
    log_ratio_safe = torch.clamp(log_ratio, min=-SAFETY_BOUND, max=SAFETY_BOUND)
    rho_squared_token = torch.exp(log_ratio_safe).square()
    return k3_kl, masked_mean(rho_squared_token, response_mask) - 1.0
