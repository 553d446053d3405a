"""Advantages within groups: by hand, against TRL's and verl's formulas, and what must not matter."""

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from prefect_rlhf.engines.functions.scores import MOST_SCORE
from prefect_rlhf.engines.rows import Batch
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.tasks.rl import group_advantages as ours
from prefect_rlhf.tasks.rl.group_advantages import grpo_advantages, informative
from prefect_rlhf.tasks.rl.groups import group_metrics, group_scores
from prefect_rlhf.tasks.rl.settings.online import GRPO
from prefect_rlhf.tasks.rl.settings.policy import KLTerm, Overlong
from tests.support.cases import examples
from tests.tasks.rl import trl_formulas as trl
from tests.tasks.rl import verl_formulas as verl

pytestmark = pytest.mark.quick

NAN = float("nan")
BY_ROW = {"grpo": ours.grpo, "dr_grpo": ours.dr_grpo, "rloo": ours.rloo}
seeds = st.integers(0, 10_000)


def doubles(*values):
    return torch.tensor(values, dtype=torch.float64)


def scored(seed, num_groups=5, group_size=4, equal=True):
    """Scores of adjacent groups of one size, one group of equal ones."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(num_groups, group_size, generator=generator).double()
    if equal:
        scores[0] = 0.1
    return scores.view(-1), torch.arange(num_groups).repeat_interleave(group_size), generator


def ragged(seed, num_rows=12, width=5, least=2):
    """Groups of any size from `least` on, rows anywhere, with the mask of responses of any length from 1 on."""
    generator = torch.Generator().manual_seed(seed)
    groups = torch.randint(0, 4, (num_rows,), generator=generator)
    groups[:least] = 9
    groups = groups.where(groups.bincount()[groups] >= least, 9)
    mask = (torch.arange(width) < torch.randint(1, width + 1, (num_rows, 1), generator=generator)).double()
    scores = torch.randn(num_rows, generator=generator).double()
    return scores, groups * 5 + 3, mask, generator


def test_grpo_by_hand():
    """Groups (1, 3) and (0, 4): means 2 and 2, unbiased deviations sqrt(2) and sqrt(8)."""
    made = ours.grpo(doubles(1, 0, 3, 4), torch.tensor([8, 5, 8, 5]), eps=0.0)
    assert made.tolist() == pytest.approx([-1 / math.sqrt(2), -2 / math.sqrt(8), 1 / math.sqrt(2), 2 / math.sqrt(8)])


def test_dr_grpo_by_hand():
    """Groups (1, 3, 8) with mean 4 and (0, 4) with mean 2."""
    made = ours.dr_grpo(doubles(1, 0, 3, 4, 8), torch.tensor([8, 5, 8, 5, 8]))
    assert made.tolist() == [-3, -2, -1, 2, 4]


def test_rloo_by_hand():
    """Group (1, 3, 8): the others' means are 5.5, 4.5 and 2. Group (0, 4): 4 and 0."""
    made = ours.rloo(doubles(1, 0, 3, 4, 8), torch.tensor([8, 5, 8, 5, 8]))
    assert made.tolist() == pytest.approx([-4.5, -4, -1.5, 4, 6])


def test_reinforce_plus_plus_by_hand():
    """Scores 3 and 0, penalties (0.5, 1) and (-1): still to come 1.5, 1 and -1, so raw 1.5, 2 and 1.
    Mean 1.5, unbiased variance 0.25."""
    mask = doubles([1, 1], [1, 0])
    made = ours.reinforce_plus_plus(doubles(3, 0), doubles([0.5, 1], [-1, 7]), mask)
    assert made.flatten().tolist() == pytest.approx([0, 1, -1, 0], abs=1e-6)


def test_reinforce_plus_plus_baseline_by_hand():
    """Group (1, 3): -1 at two tokens, 1 at one. Mean -1/3; squared deviations 4/9, 4/9, 16/9, so variance 4/3."""
    made = ours.reinforce_plus_plus_baseline(doubles(1, 3), torch.tensor([4, 4]), doubles([1, 1], [1, 0]))
    low, high = -(2 / 3) / math.sqrt(4 / 3), (4 / 3) / math.sqrt(4 / 3)
    assert made.flatten().tolist() == pytest.approx([low, low, high, 0])


def test_gdpo_by_hand():
    """Rewards (0, 2) and (5, 5), weights 2 and 1. First: -+1/sqrt(2), second: 0. Sum: -+sqrt(2), of mean 0 and unbiased
    deviation 2, so -+1/sqrt(2)."""
    made = ours.gdpo(doubles([0, 2], [5, 5]), [2.0, 1.0], torch.tensor([1, 1]), eps=1e-9)
    assert made.tolist() == pytest.approx([-1 / math.sqrt(2), 1 / math.sqrt(2)])


@given(seed=seeds, lost=st.sets(st.integers(0, 19), max_size=12), scale=st.sampled_from(["group", "none"]))
@settings(max_examples=examples(40))
def test_grpo_and_dr_grpo_equal_trls(seed, lost, scale):
    scores, groups, _ = scored(seed)
    scores[list(lost)] = NAN
    made = ours.grpo(scores, groups) if scale == "group" else ours.dr_grpo(scores, groups)
    assert torch.allclose(made, trl.grpo_advantages(scores, 4, scale), rtol=0, atol=1e-6)


@given(seed=seeds, lost=st.sets(st.integers(0, 19), max_size=12), beta=st.sampled_from([0.0, 0.1]))
@settings(max_examples=examples(40))
def test_rloo_equals_trls(seed, lost, beta):
    scores, groups, generator = scored(seed)
    scores[list(lost)] = NAN
    kl, mask = torch.randn(20, 3, generator=generator).double(), torch.ones(20, 3).double()
    made = ours.rloo(scores - beta * kl.sum(1), groups)
    assert torch.allclose(made, trl.rloo_advantages(scores, 4, kl, mask, beta), rtol=0, atol=1e-6)


@given(seed=seeds, lost=st.sets(st.integers(0, 19), max_size=8))
@settings(max_examples=examples(40))
def test_gdpo_equals_trls(seed, lost):
    """Some rows without any reward, and one to which the second does not apply."""
    scores, groups, generator = scored(seed)
    rewards = torch.stack([scores, torch.randint(0, 2, (20,), generator=generator).double()])
    rewards[:, list(lost)] = NAN
    rewards[1, 17] = NAN
    made = ours.gdpo(rewards, [1.0, 0.5], groups)
    assert torch.allclose(made, trl.gdpo_advantages(rewards.T, doubles(1.0, 0.5), 4), rtol=0, atol=1e-6)


@given(seed=seeds)
@settings(max_examples=examples(40))
def test_ragged_groups_equal_verls(seed):
    """verl's scores stand at the last token; its ids are a list. Groups of one, where it differs, are another test."""
    scores, groups, mask, _ = ragged(seed)
    index, rewards = groups.tolist(), torch.zeros_like(mask)
    rewards[:, 0] = scores
    expected = {
        "grpo": verl.compute_grpo_outcome_advantage(rewards, mask, index, 1e-4),
        "dr_grpo": verl.compute_grpo_outcome_advantage(rewards, mask, index, norm_adv_by_std_in_grpo=False),
        "rloo": verl.compute_rloo_outcome_advantage(rewards, mask, index),
    }
    for name, function in BY_ROW.items():
        assert torch.allclose(function(scores, groups)[:, None] * mask, expected[name], rtol=0, atol=1e-6), name
    made = ours.reinforce_plus_plus_baseline(scores, groups, mask)
    theirs = verl.compute_reinforce_plus_plus_baseline_outcome_advantage(rewards, mask, index)
    assert torch.allclose(made, theirs, rtol=0, atol=1e-6)


@given(seed=seeds, beta=st.sampled_from([0.0, 0.05, 1.0]))
@settings(max_examples=examples(40))
def test_reinforce_plus_plus_equals_verls(seed, beta):
    scores, _, mask, generator = ragged(seed)
    old, ref = (torch.randn(mask.shape, generator=generator).double() * mask for _ in range(2))
    at_the_end = mask * (mask.flip(1).cumsum(1).flip(1) == 1)
    rewards = verl.compute_rewards(scores[:, None] * at_the_end, old, ref, beta)
    made = ours.reinforce_plus_plus(scores, beta * (old - ref), mask)
    expected = verl.compute_reinforce_plus_plus_outcome_advantage(rewards, mask, gamma=1.0)
    assert torch.allclose(made, expected, rtol=0, atol=1e-6)


@given(seed=seeds, lost=st.sets(st.integers(0, 11), max_size=11))
@settings(max_examples=examples(40))
def test_a_row_without_a_score_has_no_effect(seed, lost):
    scores, groups, mask, generator = ragged(seed, least=1)
    kept = torch.tensor([b not in lost for b in range(12)])
    scores, others = scores.where(kept, NAN), torch.randn(12, generator=generator).double().where(kept, NAN)
    weighted, penalties = mask * kept[:, None], mask * 0.3
    everywhere = {
        **{name: function(scores, groups) for name, function in BY_ROW.items()},
        "gdpo": ours.gdpo(torch.stack([scores, others]), [1.0, 2.0], groups),
        "reinforce_plus_plus": ours.reinforce_plus_plus(scores, penalties, weighted),
        "baseline": ours.reinforce_plus_plus_baseline(scores, groups, weighted),
    }
    left = {
        **{name: function(scores[kept], groups[kept]) for name, function in BY_ROW.items()},
        "gdpo": ours.gdpo(torch.stack([scores[kept], others[kept]]), [1.0, 2.0], groups[kept]),
        "reinforce_plus_plus": ours.reinforce_plus_plus(scores[kept], penalties[kept], mask[kept]),
        "baseline": ours.reinforce_plus_plus_baseline(scores[kept], groups[kept], mask[kept]),
    }
    for name, made in everywhere.items():
        assert made[~kept].eq(0).all(), name
        assert torch.allclose(made[kept], left[name], rtol=0, atol=1e-9), name


@given(seed=seeds, order=st.permutations(range(12)))
@settings(max_examples=examples(30))
def test_the_order_of_rows_does_not_matter(seed, order):
    scores, groups, _, _ = ragged(seed, least=1)
    for name, function in BY_ROW.items():
        assert torch.allclose(function(scores, groups)[order], function(scores[order], groups[order])), name


@given(st.lists(st.sampled_from([MOST_SCORE, -MOST_SCORE, 0.0, 1.0, NAN]), min_size=8, max_size=8))
def test_scores_up_to_the_bound_do_not_overflow_group_statistics(scores):
    """Their squares and the sums of these are within float32."""
    rollout, groups = rollout_of([1, 2] * 4, [4, 5] * 4), torch.tensor([4, 5] * 4)
    stats = group_scores(torch.tensor(scores), groups)
    assert stats.deviation_P.isfinite().all() and stats.centred_B.isfinite().all()
    for advantage in ("grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo"):
        named = {"a": scores, "b": scores}
        made = grpo_advantages.function(rollout, scores_of(*scores, **named), settings=GRPO(advantage=advantage))
        assert made.columns["advantages"].isfinite().all(), advantage
        assert all(math.isfinite(value) for value in made.metrics.values()), advantage


@given(value=st.floats(-1e6, 1e6), size=st.integers(1, 7))
def test_a_group_with_equal_scores_or_one_score_has_advantage_exactly_zero(value, size):
    """Also where rounding would leave a deviation: 3 * 0.1 / 3 is not 0.1."""
    scores, groups = torch.full((size,), value), torch.zeros(size).long()
    for name, function in BY_ROW.items():
        assert function(scores, groups).eq(0).all(), name
    assert group_scores(scores, groups).deviation_P.tolist() == [0]
    assert ours.gdpo(torch.stack([scores, scores]), [1.0, 1.0], groups).eq(0).all()


def test_metrics_of_scores_by_hand():
    """Groups (1, 3, -), (2, 2), (-): mean of 4 scores 2; deviations sqrt(2) and 0; 2 of 6 rows without a score."""
    scores, groups = torch.tensor([1.0, 3.0, NAN, 2.0, 2.0, NAN]), torch.tensor([0, 0, 0, 1, 1, 2])
    made = group_metrics(scores, {"exact": torch.tensor([1.0, 0.0, NAN, NAN, NAN, NAN])}, groups)
    expected = {"score": 2.0, "unscored": 1 / 3, "group_deviation": math.sqrt(2) / 2, "zero_deviation": 0.5}
    ends = {"score_low": made.pop("score_low"), "score_high": made.pop("score_high")}
    assert made == pytest.approx(expected | {"score_exact": 0.5})
    assert list(ends.values()) == [2.0, 2.0], "the mean of both groups with a score"


def test_the_interval_of_a_score_is_over_groups():
    """Two prompts of 0 and 1, eight rows each: as wide as for two rows."""
    scores = torch.tensor([0.0] * 8 + [1.0] * 8)
    made = group_metrics(scores, {}, torch.arange(2).repeat_interleave(8))
    assert (made["score_low"], made["score_high"]) == (0.0, 1.0)
    assert group_metrics(scores, {"low": scores}, torch.arange(16))["score_low"] == 0.5, "a reward of that name"


def rollout_of(lengths, groups, **columns):
    rows = {"logprobs": [torch.full((length,), -1.0) for length in lengths], **columns}
    return Batch(rows, torch.tensor(groups))


def scores_of(*scores, **named):
    columns = {"scores": scores, **named}
    return Batch({name: [torch.tensor(float(value)) for value in values] for name, values in columns.items()})


def test_every_token_of_a_response_has_its_advantage():
    made = grpo_advantages.function(rollout_of([1, 2], [4, 4]), scores_of(1.0, 3.0), settings=GRPO(advantage="dr_grpo"))
    assert made.columns["advantages"].tolist() == [[-1, 0], [1, 1]]
    assert made.columns["row_weights"].tolist() == [1, 1]
    assert made.metrics == pytest.approx(
        {"score": 2.0, "unscored": 0.0, "group_deviation": math.sqrt(2), "zero_deviation": 0.0}
        | {"score_low": 2.0, "score_high": 2.0}
        | {"response_tokens": 1.5, "truncated": 0.0, "trained_tokens": 3.0, "zero_advantage": 0.0}
    )


def test_the_share_of_rows_without_an_advantage_is_a_metric():
    """Equal scores give none, nor does a score that failed; a penalty for length gives one in spite of equal scores."""
    rollout = rollout_of([1, 2, 1, 1], [4, 4, 5, 5])
    made = grpo_advantages.function(rollout, scores_of(2.0, 2.0, 1.0, 3.0), settings=GRPO())
    assert made.metrics["zero_advantage"] == 0.5
    assert grpo_advantages.function(rollout, scores_of(2, 2, NAN, 3), settings=GRPO()).metrics["zero_advantage"] == 1
    algo = GRPO(sampling={"max_new_tokens": 2}, overlong=Overlong(buffer=2))
    shaped = grpo_advantages.function(rollout, scores_of(2, 2, 1, 3), settings=algo).metrics
    assert shaped["zero_deviation"] == 0.5 and shaped["zero_advantage"] == 0


def test_selecting_groups_counts_groups_with_equal_scores():
    """Metrics of all groups: after the choice, no group with equal scores is left to count."""
    rollout = rollout_of([1] * 6, [4, 4, 5, 5, 6, 6])
    made = informative.function(rollout, scores_of(2, 2, 1, 3, NAN, NAN), settings=GRPO())
    assert made.columns["keep"].tolist() == [False, False, True, True, False, False]
    assert made.metrics == pytest.approx({"unscored": 1 / 3, "zero_deviation": 0.5})


@pytest.mark.parametrize("failed", [NAN, float("inf")])
@pytest.mark.parametrize(
    "advantage", ["grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]
)
def test_a_failed_score_leaves_its_row_out(failed, advantage):
    """Its two tokens and itself count in neither of the totals of its group."""
    rollout, scores = rollout_of([1, 2, 1], [4, 4, 4]), scores_of(1.0, failed, 3.0)
    made = grpo_advantages.function(rollout, scores, settings=GRPO(advantage=advantage))
    assert made.columns["advantages"][1].eq(0).all()
    assert made.columns["advantages"].isfinite().all()
    assert made.columns["advantages"][2, 0] > 0 > made.columns["advantages"][0, 0]
    assert made.columns["row_weights"].tolist() == [1, 0, 1]
    assert made.columns["group_tokens"].tolist() == [2, 2, 2]
    assert made.columns["group_rows"].tolist() == [2, 2, 2]
    assert made.metrics["unscored"] == pytest.approx(1 / 3)
    assert made.metrics["score"] == 2.0


@pytest.mark.parametrize("advantage", ["grpo", "reinforce_plus_plus", "gdpo"])
def test_a_step_in_which_every_score_failed_has_finite_advantages(advantage):
    rollout, scores = rollout_of([1, 2], [4, 4]), scores_of(NAN, NAN, a=(NAN, NAN), b=(NAN, NAN))
    made = grpo_advantages.function(rollout, scores, settings=GRPO(advantage=advantage))
    assert made.columns["advantages"].eq(0).all()
    assert all(math.isfinite(value) for value in made.metrics.values())
    lengths = {"response_tokens": 1.5, "truncated": 0.0, "trained_tokens": 0.0}
    assert made.metrics == {"unscored": 1.0, "zero_advantage": 1.0} | lengths, (
        "no score is not a score of 0, and no group has equal scores"
    )


def test_a_masked_cut_response_counts_only_in_its_groups_mean():
    """Of 3 tokens at most: the second. Scores 1, 0, 5 have mean 2."""
    algo = GRPO(advantage="dr_grpo", overlong=Overlong(mask=True), sampling={"max_new_tokens": 3})
    made = grpo_advantages.function(rollout_of([1, 3, 2], [4, 4, 4]), scores_of(1, 0, 5), settings=algo)
    assert made.columns["advantages"].tolist() == [[-1, 0, 0], [0, 0, 0], [3, 3, 0]]
    assert made.columns["row_weights"].tolist() == [1, 0, 1]
    assert made.columns["group_tokens"].tolist() == [3, 3, 3]
    assert made.metrics["truncated"] == pytest.approx(1 / 3)


def test_the_overlong_penalty_is_part_of_the_score():
    """Limit 4, buffer 2, penalty 3: lengths 2, 3, 4 lose 0, 1.5 and 3. Scores 3, 3, 3 become 3, 1.5, 0, of mean 1.5."""
    algo = GRPO(advantage="dr_grpo", overlong=Overlong(buffer=2, penalty=3.0), sampling={"max_new_tokens": 4})
    made = grpo_advantages.function(rollout_of([2, 3, 4], [4, 4, 4]), scores_of(3, 3, 3), settings=algo)
    assert made.columns["advantages"][:, 0].tolist() == [1.5, 0.0, -1.5]
    assert made.metrics["overlong_penalty"] == -1.5
    assert made.metrics["score"] == 3.0


def test_kl_in_the_reward_is_the_sum_over_a_response():
    """k1 of (-1, -1) against (-2, -1.5) is 1.5, of (-1) against (-3) is 2; coefficient 0.1, so 1 - 0.15 and 1 - 0.2."""
    algo = GRPO(advantage="dr_grpo", kl=KLTerm(coefficient=0.1, estimator="k1", place="reward"))
    rollout, scores = rollout_of([2, 1], [4, 4]), scores_of(1, 1)
    reference = Batch({"logprobs": [torch.tensor([-2.0, -1.5]), torch.tensor([-3.0])]})
    made = grpo_advantages.function(rollout, scores, reference, settings=algo)
    assert made.columns["advantages"].flatten().tolist() == pytest.approx([0.025, 0.025, -0.025, 0.0], abs=1e-6)
    assert made.metrics["kl"] == pytest.approx(1.75)
    again = grpo_advantages.function(rollout, scores, reference, reference, settings=algo)
    assert again.metrics["kl"] == 0  # recomputed log-probabilities take the place of generation's
    with pytest.raises(InvalidInput, match="'no reference', expected the reference's logprobs as the third"):
        grpo_advantages.function(rollout, scores, settings=algo)


def test_the_rows_own_mask_decides_which_tokens_are_trained():
    mask = [torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])]
    made = grpo_advantages.function(
        rollout_of([2, 2], [4, 4], mask=mask), scores_of(1.0, 3.0), settings=GRPO(advantage="dr_grpo")
    )
    assert made.columns["advantages"].tolist() == [[-1, 0], [0, 1]]
    assert made.columns["group_tokens"].tolist() == [2, 2]
    assert made.metrics["response_tokens"] == 2.0


def test_gdpo_reads_the_named_rewards():
    """As by hand above; each named reward has a metric."""
    algo = GRPO(advantage="gdpo", reward_weights={"exact": 2.0, "short": 1.0})
    rollout, scores = rollout_of([1, 1], [4, 4]), scores_of(5, 9, exact=(0, 2), short=(5, 5))
    made = grpo_advantages.function(rollout, scores, settings=algo)
    assert made.columns["advantages"].flatten().tolist() == pytest.approx(
        [-1 / math.sqrt(2), 1 / math.sqrt(2)], abs=1e-3
    )
    assert (made.metrics["score_exact"], made.metrics["score_short"]) == (1.0, 5.0)


def test_gdpo_without_named_rewards_or_with_other_weights_is_refused():
    rollout = rollout_of([1, 1], [4, 4])
    with pytest.raises(InvalidInput, match="named rewards: got 'none', expected two or more"):
        grpo_advantages.function(rollout, scores_of(1, 2), settings=GRPO(advantage="gdpo"))
    algo = GRPO(advantage="gdpo", reward_weights={"exactt": 1.0, "short": 1.0})
    with pytest.raises(InvalidInput, match="reward_weights: got .*exactt.*expected a weight for each of exact, short"):
        grpo_advantages.function(rollout, scores_of(1, 2, exact=(1, 2), short=(0, 1)), settings=algo)


@given(seed=seeds)
@settings(max_examples=20)
def test_whatever_the_groups_an_advantage_rises_with_the_score(seed):
    scores, groups, _, _ = ragged(seed)
    assume(len(set(scores.tolist())) == 12)
    for name, function in BY_ROW.items():
        made = function(scores, groups)
        for group in groups.unique():
            rows = groups == group
            assert made[rows].argsort().tolist() == scores[rows].argsort().tolist(), name
