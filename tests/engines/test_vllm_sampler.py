"""Inverting a cumulative distribution in two levels, against numpy in one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from prefect_rlhf.engines.vllm.sampler import draw


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
