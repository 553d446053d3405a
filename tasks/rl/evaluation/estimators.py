"""Estimates a model's quality from several samples per prompt: one value per prompt.

Shapes: P prompts, N samples of each. A sample without a score is NaN, and does not count.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def avg(scores_PN: Floats) -> Floats:
    """Return [P]: the mean score of each prompt's samples, avg@N; NaN for a prompt without a score.

    >>> avg(np.array([[1.0, 0.0], [1.0, np.nan]]))
    array([0.5, 1. ])
    """
    known_PN = np.isfinite(scores_PN)
    count_P = known_PN.sum(1)
    sums_P = np.where(known_PN, scores_PN, 0.0).sum(1)
    return np.where(count_P > 0, sums_P / np.maximum(count_P, 1), np.nan)


def pass_at(scores_PN: Floats, k: int, right: float) -> Floats:
    """Return [P]: pass@k, the chance that at least one of k samples is right, with a score of `right` or more.

    The unbiased estimator 1 - C(n-c, k) / C(n, k) for n samples with c right samples (Chen et al. 2021,
    arXiv:2107.03374, equation 1). NaN for a prompt with fewer than k scores.

    >>> pass_at(np.array([[1.0, 0.0, 0.0, 0.0]]), 2, right=1.0)
    array([0.5])
    """
    known_PN = np.isfinite(scores_PN)
    count_P, right_P = known_PN.sum(1), (known_PN & (scores_PN >= right)).sum(1)
    passed_P = np.full(len(scores_PN), np.nan)
    for n in np.unique(count_P[count_P >= k]).tolist():
        chances = np.array([1 - math.comb(n - c, k) / math.comb(n, k) for c in range(n + 1)])
        of_n = count_P == n
        passed_P[of_n] = chances[right_P[of_n]]
    return passed_P


def maj(scores_PN: Floats, answers_PN: NDArray[np.int64]) -> Floats:
    """Return [P]: maj@N, the score of the answer that most samples gave; in a tie, the mean over the tied answers.

    Equal numbers are equal answers; a negative number is no answer, and does not count (Wang et al. 2022,
    arXiv:2203.11171, "self-consistency"). An answer's score is the mean score of its samples. NaN for a prompt without
    an answer that has a score.

    >>> maj(np.array([[1.0, 0.0, 1.0]]), np.array([[7, 3, 7]]))
    array([1.])
    """
    known_PN = np.isfinite(scores_PN) & (answers_PN >= 0)
    equal_PNN = (answers_PN[:, :, None] == answers_PN[:, None, :]) & known_PN[:, :, None] & known_PN[:, None, :]
    votes_PN = equal_PNN.sum(2)
    most_PN = known_PN & (votes_PN == votes_PN.max(1, keepdims=True))
    return avg(np.where(most_PN, scores_PN, np.nan))  # answers of a tie have equally many samples
