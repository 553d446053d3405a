"""Losses: against numbers by hand, other people's formulas rewritten here, gradients, and splits of the rows."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from prefect_rlhf.engines.losses.mean_over import row_parts
from prefect_rlhf.tasks.rl.losses import (
    bradley_terry,
    grpo,
    policy_gradient,
    ppo_clip,
    value_clip,
    weighted_policy_gradient,
)
from prefect_rlhf.tasks.rl.preference_losses import dpo
from prefect_rlhf.tasks.rl.settings.offline import DPO
from prefect_rlhf.tasks.rl.settings.online import GRPO, PPO, ReMax, Reward
from prefect_rlhf.tasks.settings import Settings
from tests.tasks.rl.loss_sums import loss_sums

pytestmark = pytest.mark.quick

LOSSES = {
    "ppo_clip": (ppo_clip, PPO()),
    "value_clip": (value_clip, PPO()),
    "value_unclipped": (value_clip, PPO(value_clip=None)),
    "policy_gradient": (policy_gradient, Settings()),
    "weighted_policy_gradient": (weighted_policy_gradient, ReMax()),
    "grpo": (grpo, GRPO()),
    "dpo": (dpo, DPO(loss="cdpo", label_smoothing=0.1)),
    "bradley_terry": (bradley_terry, Reward(centering=0.01)),
}


def rows(num_rows=6, width=5, seed=0):
    """A batch with all columns that some loss reads, float64, and an output near the old policy's."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, width + 1, (num_rows,), generator=generator)
    lengths[0] = width
    mask = (torch.arange(width)[None] < lengths[:, None]).double()
    names = ("logprobs", "advantages", "returns", "values", "ref_inference.logprobs")
    batch = {name: torch.randn(num_rows, width, generator=generator).double() * mask for name in names}
    batch["mask"] = mask
    moved = 0.3 * torch.randn(num_rows, width, generator=generator).double()
    return batch, moved * mask


def output_of(name, batch, moved):
    if name == "bradley_terry":
        return moved[:, 0] * 5
    return (batch["values" if name.startswith("value") else "logprobs"] + moved).clone()


def value_and_gradient(name, batch, output):
    function, algo = LOSSES[name]
    output = output.clone().requires_grad_()
    terms = loss_sums(function, output, batch, algo)
    terms.total.backward()
    return terms, output.grad


def pick(batch, index):
    return {name: values[index] for name, values in batch.items()}


@pytest.mark.parametrize("name", LOSSES)
def test_split_rows_add_up(name):
    """Any split into micro-batches of whole items gives the same sums, metrics and gradients."""
    batch, moved = rows()
    output = output_of(name, batch, moved)
    whole, gradient = value_and_gradient(name, batch, output)
    parts = [slice(0, 2), slice(2, 6)]
    made = [value_and_gradient(name, pick(batch, part), output[part]) for part in parts]
    assert torch.allclose(sum(terms.total for terms, _ in made), whole.total)
    assert torch.allclose(sum(terms.weight for terms, _ in made), whole.weight)
    assert torch.allclose(torch.cat([part for _, part in made]), gradient)
    for metric, value in whole.metrics.items():
        assert torch.allclose(sum(terms.metrics[metric] for terms, _ in made), value), metric


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "bradley_terry"])
@given(extra=st.integers(1, 4), seed=st.integers(0, 5))
@settings(max_examples=10)
def test_more_padding_changes_nothing(name, extra, seed):
    batch, moved = rows(seed=seed)
    output = output_of(name, batch, moved)
    whole, gradient = value_and_gradient(name, batch, output)
    wide = {key: F.pad(values, (0, extra)) for key, values in batch.items()}
    terms, wide_gradient = value_and_gradient(name, wide, F.pad(output, (0, extra)))
    assert torch.allclose(terms.total, whole.total)
    assert torch.allclose(terms.weight, whole.weight)
    assert torch.allclose(wide_gradient, F.pad(gradient, (0, extra)))
    for metric, value in whole.metrics.items():
        assert torch.allclose(terms.metrics[metric], value), metric


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_finite_differences(name):
    """Away from the corners of max and clamp, of which this batch has none within the difference."""
    batch, moved = rows(seed=11)
    output = output_of(name, batch, moved)
    function, algo = LOSSES[name]
    _, gradient = value_and_gradient(name, batch, output)
    step = 1e-6
    for index in torch.cartesian_prod(*(torch.arange(size) for size in output.shape)).view(-1, output.dim()).tolist():
        up, down = output.clone(), output.clone()
        up[tuple(index)] += step
        down[tuple(index)] -= step
        slope = (loss_sums(function, up, batch, algo).total - loss_sums(function, down, batch, algo).total) / (2 * step)
        assert float(slope) == pytest.approx(float(gradient[tuple(index)]), abs=1e-6)


def one_row(**values):
    return {name: torch.tensor([row]) for name, row in values.items()} | {
        "mask": torch.ones(1, len(values["logprobs"]))
    }


def test_ppo_clip_by_hand():
    """Clip 0.2, ratios 1.5, 0.5, 1.1, advantages 1, 1, -2.
    Gains: min(1.5, 1.2) = 1.2; min(0.5, 0.8) = 0.5; min(-2.2, -2.2) = -2.2; the loss is minus their sum, 0.5."""
    new = torch.tensor([[math.log(1.5), math.log(0.5), math.log(1.1)]], requires_grad=True)
    terms = loss_sums(ppo_clip, new, one_row(logprobs=[0.0] * 3, advantages=[1.0, 1.0, -2.0]), PPO(clip=0.2))
    assert float(terms.total.detach()) == pytest.approx(0.5)
    assert float(terms.weight) == 3
    assert float(terms.metrics["clip_fraction"]) == 2
    assert float(terms.metrics["ratio"]) == pytest.approx(3.1)
    terms.total.backward()
    # no gradient where the gain is clipped; else minus ratio times advantage
    assert new.grad.tolist() == [pytest.approx([0.0, -0.5, 2.2])]


def test_at_the_old_policy_ppo_is_the_policy_gradient():
    """Ratio 1 everywhere: the same gradient as REINFORCE, and no KL."""
    batch, _ = rows()
    terms, gradient = value_and_gradient("ppo_clip", batch, batch["logprobs"])
    _, expected = value_and_gradient("policy_gradient", batch, batch["logprobs"])
    assert torch.allclose(gradient, expected)
    assert float(terms.metrics["approx_kl"]) == 0
    assert float(terms.metrics["clip_fraction"]) == 0


def test_weighted_by_the_ratio_an_old_policys_responses_give_the_new_policys_gradient():
    """Counted out: all answers of one token, each as often as the old policy gives it, against the new one's own."""
    generator = torch.Generator().manual_seed(0)
    old, new = (torch.randn(6, generator=generator).double() for _ in range(2))
    gain = torch.randn(6, generator=generator).double()
    new.requires_grad_()
    expected = torch.autograd.grad((new.softmax(0) * gain).sum(), new)[0]
    logprobs = new.log_softmax(0)[:, None]
    weights = old.softmax(0)[:, None]  # the share of rows with each answer
    batch = {"logprobs": old.log_softmax(0)[:, None], "advantages": gain[:, None] * weights, "mask": torch.ones(6, 1)}
    terms = loss_sums(weighted_policy_gradient, logprobs, batch, ReMax(max_ratio=1e6))
    assert torch.allclose(-torch.autograd.grad(terms.total, new)[0], expected)


def test_no_token_weighs_more_than_the_largest_ratio():
    logprobs = torch.tensor([[0.0, -1.0]], requires_grad=True)
    batch = {"logprobs": torch.tensor([[-3.0, -1.0]]), "advantages": torch.ones(1, 2), "mask": torch.ones(1, 2)}
    terms = loss_sums(weighted_policy_gradient, logprobs, batch, ReMax(max_ratio=2.0))
    terms.total.backward()
    assert logprobs.grad.tolist() == [[-2.0, -1.0]]
    assert float(terms.metrics["truncated_fraction"]) == 1.0


def trl_ppo_losses(batch, logprobs, values, cliprange, cliprange_value):
    """TRL's PPOTrainer.train: pg_loss and vf_loss, with its masked_mean, written from its source."""

    def masked_mean(x):
        return (x * batch["mask"]).sum() / batch["mask"].sum()

    ratio = torch.exp(logprobs - batch["logprobs"])
    pg_losses = -batch["advantages"] * ratio
    pg_losses2 = -batch["advantages"] * torch.clamp(ratio, 1.0 - cliprange, 1.0 + cliprange)
    clipped = torch.clamp(values, batch["values"] - cliprange_value, batch["values"] + cliprange_value)
    vf_losses1 = torch.square(values - batch["returns"])
    vf_losses2 = torch.square(clipped - batch["returns"])
    vf_loss = 0.5 * masked_mean(torch.max(vf_losses1, vf_losses2))
    return masked_mean(torch.max(pg_losses, pg_losses2)), vf_loss, masked_mean((vf_losses2 > vf_losses1).double())


@given(seed=st.integers(0, 50))
@settings(max_examples=20)
def test_ppo_losses_equal_trls(seed):
    batch, moved = rows(seed=seed)
    new, values = batch["logprobs"] + moved, batch["values"] + 2 * moved
    policy, value, clipped = trl_ppo_losses(batch, new, values, 0.2, 0.3)
    ours = loss_sums(ppo_clip, new, batch, PPO(clip=0.2))
    assert torch.allclose(ours.total / ours.weight, policy)
    ours = loss_sums(value_clip, values, batch, PPO(value_clip=0.3))
    assert torch.allclose(ours.total / ours.weight, value)
    assert torch.allclose(ours.metrics["clip_fraction"] / ours.weight, clipped)


def test_value_clip_by_hand():
    """Old 1, new 2, return 3, clip 0.5: errors (2-3)^2 = 1 and (1.5-3)^2 = 2.25; the loss is half the larger."""
    batch = one_row(logprobs=[0.0], values=[1.0], returns=[3.0])
    terms = loss_sums(value_clip, torch.tensor([[2.0]]), batch, PPO(value_clip=0.5))
    assert float(terms.total) == 1.125
    terms = loss_sums(value_clip, torch.tensor([[2.0]]), batch, PPO(value_clip=None))
    assert float(terms.total) == 0.5


def test_bradley_terry_is_the_cross_entropy_of_choosing():
    """Two answers are two classes; the chosen one is class 0."""
    scores = torch.tensor([2.0, 1.0, 0.0, 3.0])
    terms = loss_sums(bradley_terry, scores, {}, Reward())
    assert torch.allclose(terms.total, F.cross_entropy(scores.view(2, 2), torch.tensor([0, 0]), reduction="sum"))
    assert (float(terms.weight), float(terms.metrics["accuracy"])) == (2, 1)
    centred = loss_sums(bradley_terry, scores, {}, Reward(centering=0.5))
    assert float(centred.total - terms.total) == pytest.approx(0.5 * (9 + 9))


@pytest.mark.parametrize("over", ["tokens", "rows", 3.0])
def test_a_value_that_is_not_trained_on_may_be_anything(over):
    """0/0 at padding is not a number, and neither is the mean of a row without tokens; so is each gradient of them."""
    values = torch.tensor([[1.0, 2.0], [3.0, 0.0], [0.0, 0.0]], requires_grad=True)
    mask = torch.tensor([[1.0, 1.0], [1.0, 0.0], [0.0, 0.0]])
    parts = row_parts(over, {"mask": mask})
    odd = torch.where(mask > 0, values, float("nan"))
    (_, found), (_, expected) = parts.loss_sum(odd), parts.loss_sum(values)
    assert found == expected and parts.metric_sum("odd", odd) == parts.metric_sum("odd", values)
    assert torch.equal(*(torch.autograd.grad(total, values)[0] for total in (found, expected)))
    if over == "rows":
        of_rows = torch.tensor([1.0, 2.0, float("nan")])
        assert parts.loss_sum(of_rows)[1] == 3
