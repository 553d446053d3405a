"""Rewards under a limit of costs: the multiplier, costs per token, mixed advantages, by hand and in a closed loop."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prefect_rlhf.engines.rows import Batch
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.tasks.rl.rewards import kl_penalised_rewards
from prefect_rlhf.tasks.rl.safety import LagrangeState, kl_penalised_costs, lagrange_advantages, lagrange_multiplier
from prefect_rlhf.tasks.rl.settings.online import KLControl
from prefect_rlhf.tasks.rl.settings.safety import Lagrange, SafeRLHF

pytestmark = pytest.mark.quick


def scores(*values):
    return Batch({"scores": [torch.tensor(value) for value in values]})


def per_token(**columns):
    return Batch({key: [torch.tensor(row) for row in rows] for key, rows in columns.items()})


def test_the_multiplier_rises_with_the_costs_excess():
    """ln l: 0, then 0.1 * 1 * (2 - 1); the next cost, smoothed, is at the limit."""
    algo = SafeRLHF(limit=1.0)
    first = lagrange_multiplier.function(scores(1.0, 3.0), algo)
    assert first.columns["multiplier"].tolist() == pytest.approx([math.exp(0.1)] * 2)
    assert first.state == LagrangeState(pytest.approx(0.1), 2.0)
    second = lagrange_multiplier.function(scores(0.0, 0.0), algo, first.state)
    assert second.metrics == pytest.approx({"multiplier": math.exp(0.1), "cost": 0.0, "smoothed_cost": 1.0})


def test_the_multiplier_is_bounded_and_unknown_costs_do_not_count():
    algo = SafeRLHF(limit=0.0, lagrange=Lagrange(most=2.0))
    assert lagrange_multiplier.function(scores(1e3), algo).metrics["multiplier"] == pytest.approx(2.0)
    unknown = lagrange_multiplier.function(scores(math.nan, math.nan), algo, LagrangeState(0.3, 0.0))
    assert (unknown.state, unknown.metrics["multiplier"]) == (LagrangeState(0.3, 0.0), pytest.approx(math.exp(0.3)))
    assert lagrange_multiplier.function(scores(math.nan, 2.0), algo).metrics["cost"] == 2.0


@given(start=st.floats(0.1, 5.0), answer=st.floats(0.5, 3.0))
def test_the_multiplier_settles_where_the_cost_meets_its_limit(start, answer):
    """Of a policy whose cost falls as it is weighed more: 1 + answer - l, so l is `answer`."""
    algo, state = SafeRLHF(limit=1.0, lagrange=Lagrange(start=start)), None
    multiplier = start
    for _ in range(600):
        made = lagrange_multiplier.function(scores(1 + answer - multiplier), algo, state)
        multiplier, state = made.metrics["multiplier"], made.state
    assert multiplier == pytest.approx(answer, rel=1e-2)


def test_the_cost_is_at_the_last_token_and_kl_at_every_token():
    """KL 0.5 and 0.1 nats at a coefficient of 0.2; the cost of 3 at the end. The unknown cost has no part."""
    algo = SafeRLHF(kl=KLControl(kind="fixed", coefficient=0.2))
    policy, reference = per_token(logprobs=[[-1.0, -2.0], [-1.0]]), per_token(logprobs=[[-1.5, -2.1], [-1.0]])
    made = kl_penalised_costs.function(policy, reference, scores(3.0, math.nan), settings=algo)
    assert made.columns["rewards"][0].tolist() == pytest.approx([0.1, 3.02])
    assert made.columns["row_weights"].tolist() == [1.0, 0.0]


@given(multiplier=st.floats(0.01, 10.0))
def test_the_mixture_pays_the_kl_penalty_once_whatever_the_multiplier(multiplier):
    algo = SafeRLHF(kl=KLControl(kind="fixed", coefficient=0.2))
    given = per_token(logprobs=[[-1.0, -2.0]]), per_token(logprobs=[[-1.5, -2.1]]), scores(0.0)
    gained, spent = (
        of.function(*given, settings=algo).columns["rewards"] for of in (kl_penalised_rewards, kl_penalised_costs)
    )
    mixed = (gained - multiplier * spent) / (1 + multiplier)
    assert mixed[0].tolist() == pytest.approx([-0.1, -0.02], abs=1e-6)


def test_advantages_are_weighed_against_each_other():
    """(1 - 3 * 2) / 4 and (0 - 3 * -1) / 4; a row without a cost has none."""
    sides = [
        Batch({**per_token(advantages=rows).columns, "row_weights": [torch.tensor(1.0), torch.tensor(weight)]})
        for rows, weight in (([[1.0, 0.0], [5.0]], 1.0), ([[2.0, -1.0], [7.0]], 0.0))
    ]
    made = lagrange_advantages.function(
        *sides, Batch({"multiplier": [torch.tensor(3.0)] * 2}), settings=SafeRLHF(whiten_advantages=False)
    )
    assert made.columns["advantages"].tolist() == [[-1.25, 0.75], [0.0, 0.0]]
    assert made.columns["row_weights"].tolist() == [1.0, 0.0]


def test_an_unread_setting_is_refused():
    assert SafeRLHF.model_validate_json(SafeRLHF().model_dump_json()) == SafeRLHF()
    with pytest.raises(InvalidInput, match="value_weight: 0.5 is not used: it weighs the values of a shared trunk"):
        SafeRLHF(value_weight=0.5)


def test_a_multiplier_that_starts_above_its_bound_is_refused():
    with pytest.raises(InvalidInput, match="start: got 3.0, expected at most 2, its `most`"):
        SafeRLHF(lagrange={"start": 3.0, "most": 2.0})
