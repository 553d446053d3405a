"""The rule of sampling: inverting a cumulative distribution, cutting its tail, one random stream for each row."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from prefect_rlhf.engines.sampling.sampler import draw, nucleus, row_stream, uniforms


@pytest.mark.parametrize("vocab_size", [3, 256, 257, 1000])
def test_draw_inverts_the_cumulative_distribution(vocab_size):
    probs = torch.randn(vocab_size, generator=torch.Generator().manual_seed(vocab_size)).mul(2).softmax(-1)
    uniforms = (torch.arange(5000, dtype=torch.float64) + 0.5) / 5000
    expected = np.searchsorted(np.cumsum(probs.double().numpy()), uniforms.numpy(), side="right")
    drawn = draw(probs.expand(5000, -1), uniforms).numpy()
    assert (expected != drawn).mean() < 1e-3  # a uniform at the very edge between two tokens


def test_draw_never_returns_a_token_without_probability():
    """At both ends of the unit interval too, where rounding could step over the last token."""
    probs = torch.zeros(1000)
    probs[[0, 300, 511, 700]] = torch.tensor([0.1, 0.2, 0.3, 0.4])
    edges = torch.tensor([0.0, 0.1, 0.3, 0.6, 1.0], dtype=torch.float64)
    uniforms = torch.cat([edges, torch.nextafter(edges, torch.zeros(())), torch.nextafter(edges, torch.ones(()))])
    drawn = draw(probs.expand(len(uniforms), -1), uniforms.clamp(0, 1))
    assert set(drawn.tolist()) <= {0, 300, 511, 700}


@pytest.mark.parametrize("top_p", [0.01, 0.3, 0.9, 1.0])
def test_a_nucleus_is_the_fewest_likeliest_tokens_that_have_top_p(top_p):
    probs = (torch.randn(20, 50, generator=torch.Generator().manual_seed(3)) * 2).softmax(-1)
    for row, kept in zip(probs, nucleus(probs, top_p), strict=True):
        descending = np.sort(row.numpy())[::-1].astype(np.float64)
        count = min(int(np.searchsorted(np.cumsum(descending), top_p)) + 1, 50)
        assert set(kept.nonzero()[:, 0].tolist()) == set(row.topk(count).indices.tolist())


def test_a_row_takes_the_numbers_of_its_stream_one_by_one():
    """All at once or one for each token, the k-th token gets the same number."""
    stream = row_stream(7)
    one_by_one = [torch.rand((), dtype=torch.float64, generator=stream).item() for _ in range(40)]
    assert uniforms([6, 7], 40)[1].tolist() == one_by_one
