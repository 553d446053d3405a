"""Intervals of means over prompts: how often they hold the truth, and that they are the same anywhere."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_rlhf.tasks.rl.evaluation.estimators import avg
from prefect_rlhf.tasks.rl.evaluation.intervals import MANY, Interval, interval

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(("prompts", "samples"), [(100, 1), (100, 4), (400, 1)])
def test_about_95_of_100_intervals_hold_the_true_mean(prompts, samples):
    """Each prompt has its own chance of success and a few samples; the mean chance may be far from a half."""
    random = np.random.default_rng(7)
    held, trials = 0, 400
    for _ in range(trials):
        chances = random.beta(0.4, 1.2, prompts)  # mean 0.25
        scores = (random.random((prompts, samples)) < chances[:, None]).astype(float)
        found = interval(avg(scores))
        held += found is not None and found.low <= 0.25 <= found.high
    assert 0.92 <= held / trials <= 0.98


def test_samples_of_a_prompt_do_not_count_as_prompts():
    """Eight equal samples to each prompt make no interval narrower than one."""
    once = np.random.default_rng(3).integers(0, 2, (60, 1)).astype(float)
    assert interval(avg(np.repeat(once, 8, axis=1))) == interval(avg(once))


@given(st.lists(st.floats(-1e6, 1e6) | st.just(math.nan), max_size=40))
def test_the_same_values_have_the_same_interval_around_their_mean(values):
    found = interval(np.array(values))
    known = [value for value in values if not math.isnan(value)]
    assert interval(np.array(values)) == found
    assert (found is None) == (not known)
    if found is not None:
        slack = 1e-9 * max(map(abs, known), default=0)
        assert min(known) - slack <= found.low <= found.high <= max(known) + slack
        assert found.mean == pytest.approx(sum(known) / len(known), abs=1e-6)


def test_for_many_prompts_the_normal_interval_takes_over_smoothly():
    """On either side of the bound both are nearly the same."""
    values = np.random.default_rng(1).exponential(size=MANY + 1)
    drawn, normal = interval(values[:-1]), interval(values)
    assert drawn is not None and normal is not None and drawn != normal
    assert (drawn.low, drawn.high) == pytest.approx((normal.low, normal.high), abs=0.002)


def test_a_difference_is_written_with_signs():
    assert Interval(0.04, 0.01, 0.07).as_difference == "+0.04, 95%: +0.01 to +0.07"
    assert Interval(-0.5, -1.0, 0.0).as_difference == "-0.5, 95%: -1 to +0"
