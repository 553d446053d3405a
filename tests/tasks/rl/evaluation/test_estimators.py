"""Estimators from several samples: against brute force over all draws, and closed forms."""

import math
from collections import Counter
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_rlhf.tasks.rl.evaluation.estimators import avg, maj, pass_at
from prefect_rlhf.tasks.rl.evaluation.sets import powers_of_two

pytestmark = pytest.mark.quick
SCORES = st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0, math.nan]), min_size=1, max_size=7)


@given(SCORES, st.integers(1, 7))
def test_pass_at_k_is_how_often_k_drawn_samples_have_a_right_one(scores, k):
    """Every draw without replacement of k of the samples that have a score."""
    known = [score for score in scores if not math.isnan(score)]
    draws = list(combinations(known, k))
    expected = sum(any(score >= 1 for score in draw) for draw in draws) / len(draws) if draws else math.nan
    assert pass_at(np.array([scores]), k, 1.0)[0] == pytest.approx(expected, nan_ok=True)


@given(st.integers(1, 200), st.data())
def test_pass_at_one_and_at_all_samples_have_closed_forms(n, data):
    """c/n, and whether any is right; also for many samples, whose binomials no float holds."""
    c = data.draw(st.integers(0, n))
    scores = np.array([[1.0] * c + [0.0] * (n - c)])
    assert pass_at(scores, 1, 1.0)[0] == pytest.approx(c / n)
    assert pass_at(scores, n, 1.0)[0] == float(c > 0)


@given(st.floats(0.05, 0.95), st.integers(1, 4))
def test_pass_at_k_is_unbiased(p, k):
    """Its mean over all outcomes of n samples, each right with chance p, is 1 - (1 - p)^k."""
    n = 6
    passed = [pass_at(np.array([[1.0] * c + [0.0] * (n - c)]), k, 1.0)[0] for c in range(n + 1)]
    chances = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    mean = sum(value * chance for value, chance in zip(passed, chances, strict=True))
    assert mean == pytest.approx(1 - (1 - p) ** k)


@given(st.lists(st.tuples(st.integers(-1, 3), st.sampled_from([0.0, 1.0, math.nan])), min_size=1, max_size=7))
def test_maj_is_the_score_of_the_answer_with_most_votes(samples):
    """Counted by hand: no vote for a sample without an answer or a score; ties share."""
    votes = Counter(answer for answer, score in samples if answer >= 0 and not math.isnan(score))
    winners = [answer for answer, count in votes.items() if count == max(votes.values())]
    means = [np.mean([s for a, s in samples if a == answer and not math.isnan(s)]) for answer in winners]
    answers, scores = (np.array([column]) for column in zip(*samples, strict=True))
    expected = float(np.mean(means)) if means else math.nan
    assert maj(scores, answers)[0] == pytest.approx(expected, nan_ok=True)


@given(SCORES)
def test_avg_is_the_mean_of_the_existing_scores(scores):
    known = [score for score in scores if not math.isnan(score)]
    expected = sum(known) / len(known) if known else math.nan
    assert avg(np.array([scores]))[0] == pytest.approx(expected, nan_ok=True)


def test_prompts_do_not_mix():
    """Each with its own number of scores."""
    scores = np.array([[1.0, 0.0, math.nan], [0.0, 0.0, 1.0], [math.nan] * 3])
    assert pass_at(scores, 2, 1.0) == pytest.approx([1.0, 2 / 3, math.nan], nan_ok=True)
    assert maj(scores, np.array([[5, 5, 5], [2, 2, 9], [1, 1, 1]])) == pytest.approx([0.5, 0.0, math.nan], nan_ok=True)


@given(st.integers(1, 4096))
def test_every_k_is_at_most_the_number_of_samples_which_is_included(samples):
    ks = powers_of_two(samples)
    assert ks[0] == 1 and ks[-1] == samples and list(ks) == sorted(set(ks))
