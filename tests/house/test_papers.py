"""The orders that papers report come out of the estimator, in all settings but a few that its page explains."""

from functools import partial
from pathlib import Path

import pytest

from benchmarks.papers import app as paper_app
from benchmarks.papers import hybridflow as paper_hybridflow
from benchmarks.papers import real as paper_real
from benchmarks.papers.__main__ import PAPERS, text
from benchmarks.papers.checks import Comparison
from tests.support.cases import first

PAGE = (Path(__file__).parents[2] / "docs" / "internals" / "papers.md").read_text()
DIFFERENT = {"HybridFlow, figure 12: llama-13b on 128 devices", "ReaL, figure 16: most"}
"""Orders that do not come out."""

QUICK = {
    "ReaL, 7B at three contexts": partial(paper_real.contexts, "7b"),
    "HybridFlow, 13B on 16 devices": partial(paper_hybridflow.placements, "llama-13b", 16),
    "ReaL, beyond PPO": paper_real.algorithms,
    "HybridFlow, 34B on 64 devices": partial(paper_hybridflow.placements, "llama-34b", 64),
    "HybridFlow, 34B on 128 devices": partial(paper_hybridflow.placements, "llama-34b", 128),
    "HybridFlow, shards of 7B": partial(paper_hybridflow.shards, "llama-7b"),
    "HybridFlow, shards of 13B": partial(paper_hybridflow.shards, "llama-13b"),
    "APP, interleaving": partial(paper_app.interleaving, "llama-7b", 1),
}


def holding(comparison: Comparison) -> dict[str, bool]:
    return {check.name: check.holds for check in comparison.checks}


@pytest.mark.parametrize("name", first(1, QUICK))
def test_a_papers_order_is_reproduced_unless_the_page_says_why_not(name):
    checks = holding(QUICK[name]())
    assert checks == {check: check not in DIFFERENT for check in checks}


@pytest.mark.all
@pytest.mark.parametrize("paper", PAPERS)
def test_all_of_a_papers_orders_are_reproduced_unless_the_page_says_why_not(paper):
    comparisons = [compare() for compare in PAPERS[paper]()]
    checks = {name: holds for comparison in comparisons for name, holds in holding(comparison).items()}
    assert checks == {check: check not in DIFFERENT for check in checks}
    assert all(check in text(comparisons) for check in checks)


def test_the_page_names_every_order_that_is_not_reproduced():
    assert all(f"`{name}`" in PAGE for name in DIFFERENT)


@pytest.mark.all
def test_the_searched_plan_is_no_slower_than_the_heuristic():
    """It is a point of the space that was searched."""
    case = paper_real.weak_scaling("7b", 2048)
    searched, heuristic = case.searched(), paper_real.heuristic(case)
    assert searched is not None and heuristic is not None
    assert searched.seconds <= heuristic.seconds


def test_zero_3_gathers_weights_for_every_token():
    """A 33B model's generation on four nodes is bound by the network, as the paper's is."""
    case = paper_app.same_size_case("llama-33b", 4)
    weights = 2 * 32.5e9 / 4 / (paper_app.HARDWARE.links().network * 8)  # bytes from other nodes over all ways in
    assert paper_app.zero_3_seconds(case) > 256 * weights
