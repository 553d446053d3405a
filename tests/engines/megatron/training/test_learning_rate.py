"""The learning rate of each optimizer step, beside transformers' own schedules."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import get_cosine_with_min_lr_schedule_with_warmup, get_scheduler

from prefect_rlhf.engines.megatron.training.learning_rate import rate_share
from prefect_rlhf.placement.models.model import OptimizerSpec
from tests.support.cases import examples

pytestmark = pytest.mark.quick


def shares(scheduler, steps):
    """The rate of each step under a scheduler of transformers, whose optimizer has a rate of 1."""
    found = []
    for _ in range(steps):
        found.append(scheduler.get_last_lr()[0])
        scheduler.optimizer.step()
        scheduler.step()
    return found


def optimizer():
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=1.0)


@given(st.integers(0, 6), st.integers(1, 12), st.sampled_from(["constant", "linear", "cosine"]))
@settings(max_examples=examples(40), deadline=None)
def test_learning_rates_match_transformers(warmup, falls, schedule):
    """But that the warm-up's first step has a rate above 0, as each of them comes a step earlier."""
    steps = warmup + falls
    name = "constant_with_warmup" if schedule == "constant" else schedule
    expected = shares(get_scheduler(name, optimizer(), warmup, steps), steps)
    spec = OptimizerSpec(warmup_steps=warmup, schedule=schedule, decay_steps=None if schedule == "constant" else steps)
    found = [rate_share(spec, step) for step in range(1, steps + 1)]
    assert found[warmup:] == pytest.approx(expected[warmup:])
    assert found[: max(0, warmup - 1)] == pytest.approx(expected[1:warmup])
    assert all(share > 0 for share in found)


def test_a_rate_falls_to_a_share_of_itself():
    """As transformers' cosine does with `min_lr_rate`, and stays there."""
    scheduler = get_cosine_with_min_lr_schedule_with_warmup(optimizer(), 2, 10, min_lr_rate=0.1)
    spec = OptimizerSpec(warmup_steps=2, schedule="cosine", decay_steps=10, min_lr_ratio=0.1)
    assert [rate_share(spec, step) for step in range(3, 11)] == pytest.approx(shares(scheduler, 10)[2:])
    assert rate_share(spec, 11) == rate_share(spec, 1000) == pytest.approx(0.1)
