"""Advantages of turns: unbiased by enumeration of a small game, and equal to RLOO if plays have a single turn."""

import itertools
import math

import pytest
import torch

from prefect_rlhf.engines.rows import Batch
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.tasks.rl.group_advantages import grpo_advantages, rloo, turn_advantages
from prefect_rlhf.tasks.rl.settings.online import GRPO
from prefect_rlhf.tasks.rl.settings.policy import KLTerm

pytestmark = pytest.mark.quick

GO, RIGHT = torch.tensor([0.4, -0.7], dtype=torch.float64)
"""Logits of the game: the first turn ends the play or goes on, the second turn is right or wrong."""
PLAYS = {"ends": (0.3, 0.0), "right": (-0.2, 2.0), "wrong": (-0.2, 0.5)}
"""The rewards of the two turns."""


def log_probability(logits, play):
    """The log-probabilities of the turns of a play; 0 for a turn that it does not have."""
    go, right = logits
    last = {"ends": go * 0, "right": right.sigmoid().log(), "wrong": (-right).sigmoid().log()}[play]
    return torch.stack([(-go if play == "ends" else go).sigmoid().log(), last])


def gradient(value, logits):
    return torch.autograd.grad(value, logits)[0]


def exact_gradient():
    logits = torch.stack([GO, RIGHT]).requires_grad_()
    return gradient(sum(log_probability(logits, play).sum().exp() * sum(PLAYS[play]) for play in PLAYS), logits)


def expected_estimate(advantages_of, num_rows=3):
    """The mean of the policy gradient over all groups of plays, each with its probability."""
    total = torch.zeros(2, dtype=torch.float64)
    for group in itertools.product(PLAYS, repeat=num_rows):
        logits = torch.stack([GO, RIGHT]).requires_grad_()
        logprobs_BK = torch.stack([log_probability(logits, play) for play in group])
        rewards_BK = torch.tensor([PLAYS[play] for play in group], dtype=torch.float64)
        exists_BK = torch.tensor([[1.0, float(play != "ends")] for play in group], dtype=torch.float64)
        estimate = (advantages_of(rewards_BK, exists_BK) * logprobs_BK * exists_BK).sum() / num_rows
        total += logprobs_BK.detach().sum().exp() * gradient(estimate, logits)
    return total


def ours(rewards_BK, exists_BK):
    turns_BT = torch.tensor([[0, 1]]).expand(len(rewards_BK), 2)
    return turn_advantages(rewards_BK, turns_BT, torch.zeros(len(rewards_BK)))


def centred_by_turn(rewards_BK, exists_BK):
    """Each turn's reward less the mean over the other rows with that turn, summed from turn k on."""
    others = exists_BK.sum(0) - exists_BK
    means = ((rewards_BK * exists_BK).sum(0) - rewards_BK * exists_BK) / others.clamp(min=1)
    return ((rewards_BK - means) * exists_BK).flip(1).cumsum(1).flip(1)


def test_the_mean_of_the_estimate_is_the_exact_gradient():
    assert expected_estimate(ours).tolist() == pytest.approx(exact_gradient().tolist(), abs=1e-12)


def test_rewards_centred_by_turn_are_biased():
    """Against going on, since a play that ends has fewer baselines."""
    assert expected_estimate(centred_by_turn)[0] < exact_gradient()[0] - 0.1


def rollout(turns, rewards, **columns):
    rows = [torch.tensor(row, dtype=torch.int16) for row in turns]
    given = {
        "logprobs": [torch.zeros(len(row)) for row in turns],
        "mask": [torch.ones(len(row)) for row in turns],
        "turn": rows,
        "turn_rewards": [torch.tensor(row) for row in rewards],
        "scores": [torch.tensor(math.fsum(row)) for row in rewards],
    }
    return Batch(given | columns, torch.zeros(len(turns), dtype=torch.int64))


def computed(rows, *others, **settings):
    return grpo_advantages.function(rows, rows, *others, settings=GRPO(advantage="turns", **settings))


def test_a_single_turn_play_has_rloos_advantages():
    rows = rollout([[0, 0], [0], [0, 0, 0]], [[1.0], [0.0], [0.5]])
    made = computed(rows).columns["advantages"]
    assert torch.equal(made[:, 0], rloo(torch.tensor([1.0, 0.0, 0.5]), torch.zeros(3)))
    assert made[1].tolist() == [made[1, 0], 0, 0]


def test_environment_tokens_and_failed_rows_have_no_advantage():
    """Rewards from turn 0 on 3 and 1, from turn 1 on 2 and 0. The third play failed."""
    masks = [torch.tensor([1.0, 0.0, 1.0]), torch.ones(2), torch.zeros(1)]
    rows = rollout([[0, 0, 1], [0, 0], [0]], [[1.0, 2.0], [1.0], [0.0]], mask=masks)
    rows.columns["scores"][2] = torch.tensor(math.nan)
    made = computed(rows)
    assert made.columns["advantages"].tolist() == [[2, 0, 2], [-2, -2, 0], [0, 0, 0]]
    assert made.columns["row_weights"].tolist() == [1, 1, 0]


def test_a_kl_penalty_counts_in_its_own_turn():
    """At k1 with coefficient 0.5, the log-ratios 2 and -4 cost 1 in turn 0 and earn 2 in turn 1."""
    rows = rollout([[0, 1], [0, 1]], [[0.0, 0.0], [0.0, 0.0]])
    reference = Batch({"logprobs": [torch.tensor([-2.0, 4.0]), torch.zeros(2)]})
    made = computed(rows, reference, kl=KLTerm(coefficient=0.5, estimator="k1", place="reward"))
    assert made.columns["advantages"].tolist() == [[1, 2], [-1, -2]]


def test_rows_without_turns_are_refused():
    rows = Batch({"logprobs": [torch.zeros(1)] * 2, "scores": [torch.zeros(())] * 2}, torch.zeros(2))
    with pytest.raises(
        InvalidInput, match=r"algo.advantage: got 'turns', expected another advantage, such as rloo: only a play"
    ):
        computed(rows)
