"""Measurements of a node combine those of its ranks."""

import pytest

from prefect_rlhf.engines.commands import RankReport
from prefect_rlhf.tasks.running.outcome import outcome_of


def report(num_tokens, metric_rows=None, **metrics):
    """Return a rank's report of a call."""
    memory = {"device_bytes": 0, "resident_bytes": 0, "store_bytes": 0}
    return RankReport(seconds=1.0, num_tokens=num_tokens, metrics=metrics, metric_rows=metric_rows or {}, **memory)


def test_a_mean_over_tokens_counts_each_rank_by_its_tokens():
    outcome = outcome_of({0: report(30, entropy=1.0), 1: report(10, entropy=3.0)})
    assert outcome.metrics == {"entropy": pytest.approx(1.5)}


def test_a_mean_over_rows_counts_each_rank_by_its_rows():
    """Three of four rows of the first rank, and no row of the second, were cut."""
    outcome = outcome_of(
        {0: report(32, {"truncated": 4}, truncated=0.75), 1: report(8, {"truncated": 4}, truncated=0.0)}
    )
    assert outcome.metrics == {"truncated": pytest.approx(3 / 8)}


def test_a_metric_that_some_ranks_report_is_the_mean_over_their_rows():
    """A number that only some plays return: the ranks without such a play have no value."""
    reports = {
        0: report(8, {"turns": 2}, turns=1.0),
        1: report(8, {"turns": 2, "play/solved": 1}, turns=2.0, **{"play/solved": 1.0}),
        2: report(8, {"turns": 2, "play/solved": 2}, turns=3.0, **{"play/solved": 0.25}),
    }
    assert outcome_of(reports).metrics == {"turns": pytest.approx(2.0), "play/solved": pytest.approx(0.5)}


def test_ranks_without_rows_do_not_count():
    reports = {0: report(8, {"turns": 2}, turns=3.0), 1: report(0, {"turns": 0}, turns=0.0)}
    assert outcome_of(reports).metrics == {"turns": 3.0}
