"""The rule of sampling: inverting a cumulative distribution, cutting its tail, one random stream for each row."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from prefect_rlhf.engines.sampling.sampler import Choice, choose, draw, nucleus, row_stream, uniforms
from tests.support.cases import examples
from tests.support.device import DEVICE
from tests.support.rounding import KERNEL, within

pytestmark = pytest.mark.quick


@pytest.mark.gpu
@pytest.mark.parametrize("vocab_size", [3, 256, 257, 1000])
def test_draw_inverts_the_cumulative_distribution(vocab_size):
    probs = torch.randn(vocab_size, generator=torch.Generator().manual_seed(vocab_size)).mul(2).softmax(-1)
    uniforms = (torch.arange(5000, dtype=torch.float64) + 0.5) / 5000
    expected = np.searchsorted(np.cumsum(probs.double().numpy()), uniforms.numpy(), side="right")
    drawn = draw(probs.to(DEVICE).expand(5000, -1), uniforms.to(DEVICE)).cpu().numpy()
    assert (expected != drawn).mean() < 1e-3  # a uniform at the very edge between two tokens


@pytest.mark.gpu
def test_draw_never_returns_a_token_without_probability():
    """At both ends of the unit interval too, where rounding could step over the last token."""
    probs = torch.zeros(1000)
    probs[[0, 300, 511, 700]] = torch.tensor([0.1, 0.2, 0.3, 0.4])
    edges = torch.tensor([0.0, 0.1, 0.3, 0.6, 1.0], dtype=torch.float64)
    uniforms = torch.cat([edges, torch.nextafter(edges, torch.zeros(())), torch.nextafter(edges, torch.ones(()))])
    drawn = draw(probs.to(DEVICE).expand(len(uniforms), -1), uniforms.clamp(0, 1).to(DEVICE))
    assert set(drawn.tolist()) <= {0, 300, 511, 700}


@pytest.mark.gpu
@pytest.mark.parametrize("top_p", [0.01, 0.3, 0.9, 1.0])
def test_a_nucleus_is_the_fewest_likeliest_tokens_that_have_top_p(top_p):
    probs = (torch.randn(20, 50, generator=torch.Generator().manual_seed(3)) * 2).softmax(-1)
    for row, kept in zip(probs, nucleus(probs.to(DEVICE), top_p).cpu(), strict=True):
        descending = np.sort(row.numpy())[::-1].astype(np.float64)
        count = min(int(np.searchsorted(np.cumsum(descending), top_p)) + 1, 50)
        assert set(kept.nonzero()[:, 0].tolist()) == set(row.topk(count).indices.tolist())


@pytest.mark.gpu
@given(st.integers(0, 60), st.sampled_from([0.0, 0.01, 0.2, 1.0]), st.sampled_from([0.05, 0.5, 0.9, 1.0]))
@settings(max_examples=examples(40), deadline=None)
def test_kept_tokens_match_transformers(top_k, min_p, top_p):
    """Its processors one after another, in vLLM's order; the mass is that of the distribution before them."""
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(top_k)) * 2
    left = MinPLogitsWarper(min_p)(None, logits)
    left = TopKLogitsWarper(top_k)(None, left) if top_k else left
    left = TopPLogitsWarper(top_p)(None, left) if top_p < 1 else left
    expected = logits.softmax(-1).masked_fill(left.isinf(), 0.0)
    if top_p < 1 or top_k or min_p:
        halves = torch.full((4,), 0.5, dtype=torch.float64, device=DEVICE)
        found = Choice(*(each.cpu() for each in choose(logits.to(DEVICE), halves, 1.0, top_p, top_k, min_p)))
        assert found.kept_mass_B.tolist() == within(KERNEL, expected.sum(-1))
        assert (expected.gather(1, found.tokens_B[:, None]) > 0).all()
        logprobs = logits.log_softmax(-1).gather(1, found.tokens_B[:, None])[:, 0]
        assert found.logprobs_B.tolist() == within(KERNEL, logprobs)


def test_a_row_draws_its_streams_numbers_in_order():
    """All at once or one for each token, the k-th token gets the same number."""
    stream = row_stream(7)
    one_by_one = [torch.rand((), dtype=torch.float64, generator=stream).item() for _ in range(40)]
    assert uniforms([6, 7], 40)[1].tolist() == one_by_one
