"""Importance weights between generation and training: by hand and against TRL's and verl's formulas."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefect_rlhf.engines.rows import Batch
from prefect_rlhf.tasks.rl.importance import bounded, importance_ratio, importance_weights
from prefect_rlhf.tasks.rl.settings.policy import Importance
from tests.support.cases import examples
from tests.tasks.rl import trl_formulas as trl
from tests.tasks.rl import verl_formulas as verl

pytestmark = pytest.mark.quick


def made(settings):
    """Ratios of training over generation: (4, 1/4, 1) and (1/2), so 1 and 1/2 of the responses."""
    rollout = Batch({"logprobs": [torch.zeros(3), torch.zeros(1)]})
    ratios = [[4.0, 0.25, 1.0], [0.5]]
    recomputed = Batch({"logprobs": [torch.tensor(row).log() for row in ratios]})
    return importance_weights.function(rollout, recomputed, settings)


@pytest.mark.parametrize(
    ("settings", "weights", "beyond"),
    [
        (Importance(), [[2, 0.25, 1], [0.5, 0, 0]], 1 / 4),
        (Importance(lowest=0.3), [[2, 0.3, 1], [0.5, 0, 0]], 2 / 4),
        (Importance(beyond="mask", lowest=0.3), [[0, 0, 1], [0.5, 0, 0]], 2 / 4),
        (Importance(level="sequence"), [[1, 1, 1], [0.5, 0, 0]], 0),
        (Importance(level="sequence", beyond="mask", lowest=0.6), [[1, 1, 1], [0, 0, 0]], 1 / 2),
    ],
)
def test_weights_by_hand(settings, weights, beyond):
    computed = made(settings)
    assert computed.columns["importance"].tolist() == [pytest.approx(row) for row in weights]
    assert computed.metrics["beyond_fraction"] == pytest.approx(beyond)


def test_metrics_by_hand():
    """Of the mismatch over 4 tokens: k3 sums r - 1 - log r, chi-squared r^2 - 1."""
    ratios = [4, 0.25, 1, 0.5]
    metrics = made(Importance()).metrics
    assert metrics["importance"] == pytest.approx((2 + 0.25 + 1 + 0.5) / 4)
    assert metrics["largest_ratio"] == pytest.approx(4)
    assert metrics["mismatch_kl"] == pytest.approx(sum(r - 1 - math.log(r) for r in ratios) / 4)
    assert metrics["mismatch_chi2"] == pytest.approx(sum(r * r - 1 for r in ratios) / 4)
    assert made(Importance(level="sequence")).metrics["importance"] == pytest.approx(0.75)


@given(seed=st.integers(0, 10_000), lowest=st.sampled_from([0.0, 0.5]), highest=st.sampled_from([1.0, 2.0, 3.0]))
@settings(max_examples=examples(30))
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("beyond", ["truncate", "mask"])
def test_weights_equal_trls_and_verls(level, beyond, seed, lowest, highest):
    """verl truncates from above alone, and masks (its IcePop) on both sides."""
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.arange(6) < torch.randint(1, 7, (5, 1), generator=generator)).double()
    generated, trained = (torch.randn(5, 6, generator=generator).double() * mask for _ in range(2))
    chosen = Importance(level=level, beyond=beyond, lowest=lowest, highest=highest)
    weights = bounded(importance_ratio((trained - generated) * mask, level), chosen) * mask
    theirs = trl.vllm_importance_sampling_ratio(trained, generated, mask, f"{level}_{beyond}", lowest, highest)
    assert torch.allclose(weights, theirs * mask, rtol=0, atol=1e-6)
    if beyond == "mask" or lowest == 0:
        lower = lowest if beyond == "mask" else None
        theirs = verl.compute_rollout_correction_weights(trained - generated, mask, level, highest, lower)
        assert torch.allclose(weights, theirs, rtol=0, atol=1e-6)


@given(seed=st.integers(0, 10_000))
@settings(max_examples=20)
def test_mismatch_metrics_equal_verls(seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 7, (5,), generator=generator).tolist()
    generated, trained = ([torch.randn(n, generator=generator).double() for n in lengths] for _ in range(2))
    rollout, recomputed = Batch({"logprobs": generated}), Batch({"logprobs": trained})
    metrics = importance_weights.function(rollout, recomputed, Importance()).metrics
    expected = verl.compute_offpolicy_metrics(
        recomputed["logprobs"], rollout["logprobs"], rollout.mask("logprobs").double()
    )
    assert metrics["mismatch_kl"] == pytest.approx(float(expected[0]), abs=1e-6, rel=1e-6)
    assert metrics["mismatch_chi2"] == pytest.approx(float(expected[1]), abs=1e-6, rel=1e-6)


def test_weights_are_1_if_the_engines_agree():
    rollout = Batch({"logprobs": [torch.tensor([-1.0, -2.0]), torch.tensor([-3.0])]})
    computed = importance_weights.function(rollout, rollout, Importance())
    assert computed.columns["importance"].tolist() == [[1, 1], [1, 0]]
    assert computed.metrics["mismatch_kl"] == computed.metrics["mismatch_chi2"] == 0


def test_a_ratio_too_large_for_a_float_stays_finite():
    rollout = Batch({"logprobs": [torch.full((10,), -100.0)]})
    computed = importance_weights.function(
        rollout, Batch({"logprobs": [torch.zeros(10)]}), Importance(level="sequence")
    )
    assert computed.columns["importance"].eq(2).all()
    assert all(math.isfinite(value) for value in computed.metrics.values())
