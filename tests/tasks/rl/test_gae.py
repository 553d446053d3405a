"""Advantages and rewards: numbers worked out by hand, definitions summed term by term, and what must not matter."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefect_rlhf.engines.rows import Batch
from prefect_rlhf.tasks.rl.gae import explained_variance, gae, gae_advantages, remax_advantages
from prefect_rlhf.tasks.rl.kl import kl_k1, kl_k2, kl_k3, next_coefficient
from prefect_rlhf.tasks.rl.masked import last_token, masked_mean, masked_variance, whiten
from prefect_rlhf.tasks.rl.rewards import RunningScores, kl_penalised_rewards
from prefect_rlhf.tasks.rl.settings.online import PPO, KLControl, ReMax
from tests.support.cases import examples

pytestmark = pytest.mark.quick

numbers = st.floats(-4, 4, width=32)
ragged = st.lists(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=6), min_size=1, max_size=4)
unit = st.floats(0, 1, width=32)


def columns(rows, index):
    return [torch.tensor([values[index] for values in row]) for row in rows]


def brute_force_gae(rewards, values, gamma, lam):
    """Equation 16 as it stands: for each t a sum over k, with plain Python numbers."""
    end = len(rewards)
    after = [*values[1:], 0.0]
    deltas = [rewards[t] + gamma * after[t] - values[t] for t in range(end)]
    return [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, end)) for t in range(end)]


@given(rows=ragged, gamma=unit, lam=unit)
def test_gae_is_the_double_sum_of_its_definition(rows, gamma, lam):
    made = gae.function(
        Batch({"rewards": columns(rows, 0)}),
        Batch({"values": columns(rows, 1)}),
        settings=PPO(gamma=gamma, lam=lam, whiten_advantages=False),
    )
    for b, row in enumerate(rows):
        expected = brute_force_gae([r for r, _ in row], [v for _, v in row], gamma, lam)
        assert made.columns["advantages"][b, : len(row)].tolist() == pytest.approx(expected, abs=1e-3)
        assert made.columns["advantages"][b, len(row) :].eq(0).all()
        returns = [a + v for a, (_, v) in zip(expected, row, strict=True)]
        assert made.columns["returns"][b, : len(row)].tolist() == pytest.approx(returns, abs=1e-3)


@given(rows=ragged)
def test_with_lambda_one_the_return_is_the_sum_of_rewards_to_come(rows):
    """The values cancel: a telescoping sum."""
    rewards, values = Batch({"rewards": columns(rows, 0)}), Batch({"values": columns(rows, 1)})
    returns = gae.function(rewards, values, settings=PPO(lam=1.0, whiten_advantages=False)).columns["returns"]
    for b, row in enumerate(rows):
        to_come = [math.fsum(r for r, _ in row[t:]) for t in range(len(row))]
        assert returns[b, : len(row)].tolist() == pytest.approx(to_come, abs=1e-3)


def test_gae_by_hand():
    """gamma 0.5, lambda 0.5. Deltas: 0 + 0.5*2 - 1 = 0; 0 + 0.5*0 - 2 = -2; 4 - 0 = 4.
    A2 = 4; A1 = -2 + 0.25*4 = -1; A0 = 0 + 0.25*-1 = -0.25."""
    advantages = gae_advantages(
        torch.tensor([[0.0, 0.0, 4.0]]), torch.tensor([[1.0, 2.0, 0.0]]), torch.ones(1, 3), 0.5, 0.5
    )
    assert advantages.tolist() == [[-0.25, -1.0, 4.0]]


@settings(max_examples=examples(50))
@given(rows=ragged.filter(lambda rows: sum(map(len, rows)) > 2), scale=st.floats(0.5, 8), shift=numbers)
def test_whitening_removes_scale_and_shift(rows, scale, shift):
    batch = Batch({"x": columns(rows, 0)})
    mask, values = batch.mask("x"), batch["x"].double()
    if masked_variance(values, mask) < 1e-2:
        return
    white = whiten(values, mask)
    assert float(masked_mean(white, mask)) == pytest.approx(0, abs=1e-5)
    assert float(masked_variance(white, mask)) == pytest.approx(1, abs=1e-3)
    assert torch.allclose(whiten(values * scale + shift, mask), white, atol=1e-4)


@given(rows=ragged, extra=st.integers(1, 3))
def test_padding_changes_no_statistic(rows, extra):
    """Values at padding may be anything. In double: a longer row is added up in another order."""
    batch = Batch({"x": columns(rows, 0)})
    mask, values = batch.mask("x").double(), batch["x"].double()
    wide_mask = torch.cat([mask, torch.zeros(len(rows), extra)], 1)
    wide = torch.cat([values, torch.full((len(rows), extra), 7.0)], 1)
    assert torch.allclose(masked_mean(wide, wide_mask), masked_mean(values, mask))
    assert torch.allclose(masked_variance(wide, wide_mask), masked_variance(values, mask))
    assert torch.allclose(whiten(wide, wide_mask)[:, :-extra], whiten(values, mask), atol=1e-5)


def test_the_last_token_is_each_rows_own():
    assert last_token(torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]])).tolist() == [[0, 1, 0], [0, 0, 1]]


def test_explained_variance_of_perfect_constant_and_opposite_values():
    returns, mask = torch.tensor([[1.0, 2.0, 3.0]]), torch.ones(1, 3)
    assert explained_variance(returns, returns, mask) == 1.0
    assert explained_variance(torch.ones(1, 3), returns, mask) == pytest.approx(0.0)
    assert explained_variance(-returns, returns, mask) == pytest.approx(-3.0)  # residual 2R: variance 4 times as large


def test_remax_by_hand():
    """Rewards (-0.5, 2) and (1): still to come (1.5, 2) and (1); baselines 1 and 3."""
    rewards = Batch({"rewards": [torch.tensor([-0.5, 2.0]), torch.tensor([1.0])]})
    made = remax_advantages.function(
        rewards, Batch({"scores": [torch.tensor(1.0), torch.tensor(3.0)]}), settings=ReMax()
    )
    assert made.columns["advantages"].tolist() == [[0.5, 1.0], [-2.0, 0.0]]


def penalised(algo, state=None):
    """Two responses: log-ratios (0.5, -0.25) and (1.0); scores 2 and 4."""
    policy = Batch({"logprobs": [torch.tensor([-1.0, -2.0]), torch.tensor([-0.5])]})
    reference = Batch({"logprobs": [torch.tensor([-1.5, -1.75]), torch.tensor([-1.5])]})
    scores = Batch({"scores": [torch.tensor(2.0), torch.tensor(4.0)]})
    return kl_penalised_rewards.function(policy, reference, scores, settings=algo, state=state)


def test_rewards_are_the_final_score_minus_the_penalty_at_every_token():
    """Coefficient 0.1: (-0.05, 2 + 0.025) and (4 - 0.1); KL of the responses 0.25 and 1."""
    made = penalised(PPO(kl=KLControl(kind="fixed", coefficient=0.1)))
    assert made.columns["rewards"].flatten().tolist() == pytest.approx([-0.05, 2.025, 3.9, 0.0])
    expected = {"kl": 0.625, "score": 3.0, "score_deviation": 1.0, "response_tokens": 1.5, "kl_coefficient": 0.1}
    assert {name: made.metrics[name] for name in expected} == pytest.approx(expected)
    assert made.metrics["entropy"] == pytest.approx(3.5 / 3)
    assert made.metrics["reward"] == pytest.approx((1.975 + 3.9) / 2)


def test_the_adaptive_coefficient_is_used_one_step_later():
    """KL 0.625 against target 0.5 is 25% over, counted as 20%; two of 10 responses: times 1 + 0.2 * 0.2."""
    algo = PPO(kl=KLControl(coefficient=0.1, target=0.5, horizon=10.0))
    first = penalised(algo)
    second = penalised(algo, first.state)
    assert first.metrics["kl_coefficient"] == pytest.approx(0.1)
    assert second.metrics["kl_coefficient"] == pytest.approx(0.104)


@given(kl=st.floats(0, 50), coefficient=st.floats(0.001, 1))
def test_the_coefficient_moves_towards_the_target(kl, coefficient):
    control = KLControl(target=5.0, horizon=100.0)
    after = next_coefficient(coefficient, kl, num_responses=32, control=control)
    assert (after > coefficient) == (kl / 5.0 > 1) or after == pytest.approx(coefficient)
    assert coefficient * 0.93 < after < coefficient * 1.07
    assert next_coefficient(coefficient, kl, 32, KLControl(kind="fixed")) == coefficient


def test_kl_estimates_agree_with_the_divergence_they_estimate():
    """Expectations under p over all tokens, against KL(p, q) by PyTorch."""
    generator = torch.Generator().manual_seed(3)
    p, q = (torch.randn(50, generator=generator).double().log_softmax(0) for _ in range(2))
    exact = float(torch.nn.functional.kl_div(q, p, log_target=True, reduction="sum"))
    assert float((p.exp() * kl_k1(p, q)).sum()) == pytest.approx(exact)
    assert float((p.exp() * kl_k3(p, q)).sum()) == pytest.approx(exact)
    assert kl_k3(p, q).min() >= 0


@pytest.mark.parametrize(("estimator", "gradient"), [(kl_k1, None), (kl_k2, "KL(p, q)"), (kl_k3, "KL(q, p)")])
def test_a_kl_estimates_mean_gradient_is_as_documented(estimator, gradient):
    """Tokens are drawn from p, whose draw has no gradient: expectations over all tokens."""
    generator = torch.Generator().manual_seed(4)
    p, q = (torch.randn(20, generator=generator).double() for _ in range(2))
    p.requires_grad_()
    logp, logq = p.log_softmax(0), q.log_softmax(0)
    made = torch.autograd.grad((logp.exp().detach() * estimator(logp, logq)).sum(), p, retain_graph=True)[0]
    exact = {
        None: 0 * logp.sum(),
        "KL(p, q)": (logp.exp() * (logp - logq)).sum(),
        "KL(q, p)": (logq.exp() * (logq - logp)).sum(),
    }[gradient]
    assert torch.allclose(made, torch.autograd.grad(exact, p)[0], atol=1e-12)


@given(st.lists(st.lists(numbers, min_size=1, max_size=5), min_size=1, max_size=5))
def test_running_scores_cover_all_scores_so_far(batches):
    running = RunningScores()
    for batch in batches:
        running = running.with_batch(torch.tensor(batch))
    everything = torch.tensor([score for batch in batches for score in batch]).double()
    assert running.count == len(everything)
    assert running.mean == pytest.approx(float(everything.mean()), abs=1e-6)
    assert running.squares == pytest.approx(float(everything.var(correction=0)) * len(everything), abs=1e-5)


def test_scaled_and_clipped_scores():
    """Scores 2 and 4: mean 3, unbiased deviation sqrt(2), so -+0.7071, clipped to 0.5."""
    algo = PPO(kl=KLControl(coefficient=0.0), normalise_scores=True, score_clip=0.5)
    assert penalised(algo).columns["rewards"].flatten().tolist() == pytest.approx([0, -0.5, 0.5, 0])
    assert penalised(algo).metrics["score"] == 3.0


def test_a_failed_score_leaves_its_row_out_of_ppo_and_remax():
    """Of three rows the second: what the others have is as if it were not there."""

    def steps(rows, algo):
        logprobs = [torch.tensor([-1.0, -2.0]), torch.tensor([-0.5, -0.5]), torch.tensor([-0.5])]
        scores, values = [2.0, math.nan, 4.0], [torch.tensor([0.5, 1.0]), torch.tensor([9.0, 9.0]), torch.tensor([1.0])]
        policy, reference = Batch({"logprobs": [logprobs[b] for b in rows]}), [logprobs[b] - 0.5 for b in rows]
        scored = Batch({"scores": [torch.tensor(scores[b]) for b in rows]})
        rewards = kl_penalised_rewards.function(policy, Batch({"logprobs": reference}), scored, settings=algo)
        shaped = {key: list(values) for key, values in rewards.columns.items()}
        shaped["rewards"] = [row[: len(logprobs[b])] for b, row in zip(rows, shaped["rewards"], strict=True)]
        if isinstance(algo, PPO):
            return rewards, gae.function(Batch(shaped), Batch({"values": [values[b] for b in rows]}), settings=algo)
        baselines = Batch({"scores": [torch.tensor(1.0) for _ in rows]})
        return rewards, remax_advantages.function(Batch(shaped), baselines, settings=algo)

    for algo in (PPO(normalise_scores=True), PPO(whiten_advantages=False), ReMax()):
        rewards, made = steps((0, 1, 2), algo)
        left_rewards, left = steps((0, 2), algo)
        assert made.columns["row_weights"].tolist() == [1, 0, 1]
        assert made.columns["advantages"][1].eq(0).all()
        assert torch.allclose(made.columns["advantages"][[0, 2]], left.columns["advantages"])
        assert made.metrics == pytest.approx(left.metrics)
        assert rewards.state.scores == left_rewards.state.scores
        assert rewards.metrics["score"] == 3.0
        assert rewards.metrics["unscored"] == pytest.approx(1 / 3)


def test_a_step_without_any_score_has_no_mean_of_scores():
    """No reward is not a reward of 0: a metric over nothing is left out of PPO's and ReMax's steps."""
    policy = Batch({"logprobs": [torch.tensor([-1.0, -2.0]), torch.tensor([-0.5])]})
    scores = Batch({"scores": [torch.tensor(math.nan), torch.tensor(math.nan)]})
    rewards = kl_penalised_rewards.function(policy, policy, scores, settings=PPO())
    assert {"score", "score_deviation", "reward"}.isdisjoint(rewards.metrics)
    assert rewards.metrics["unscored"] == 1.0
    assert all(math.isfinite(value) for value in rewards.metrics.values())
    made = remax_advantages.function(Batch({"rewards": policy.columns["logprobs"]}), scores, settings=ReMax())
    assert made.metrics == {"advantage_mean": 0.0}


def test_a_failed_baseline_leaves_its_row_out_of_remax():
    rewards = Batch({"rewards": [torch.tensor([-0.5, 2.0]), torch.tensor([1.0])]})
    baselines = Batch({"scores": [torch.tensor(1.0), torch.tensor(math.nan)]})
    made = remax_advantages.function(rewards, baselines, settings=ReMax())
    assert made.columns["advantages"].tolist() == [[0.5, 1.0], [0.0, 0.0]]
    assert made.columns["row_weights"].tolist() == [1, 0]
    assert made.metrics["baseline"] == 1.0
