"""Losses without a critic: by hand, against TRL's and verl's formulas, and any split of the rows."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefect_rlhf.engines.rows import NoSuchColumn
from prefect_rlhf.tasks.rl.kl import kl_estimate
from prefect_rlhf.tasks.rl.losses import grpo, ppo_clip
from prefect_rlhf.tasks.rl.settings.online import GRPO, PPO
from prefect_rlhf.tasks.rl.settings.policy import Importance, KLTerm
from tests.support.cases import examples
from tests.tasks.rl import trl_formulas as trl
from tests.tasks.rl import verl_formulas as verl
from tests.tasks.rl.loss_sums import loss_sums

pytestmark = pytest.mark.quick

REF = "ref_inference.logprobs"
WITHOUT_KL = KLTerm(coefficient=0.0)
FAMILY = {
    f"{loss} over {mean} with {kl.estimator} {kl.coefficient}": GRPO(loss=loss, mean_over=mean, kl=kl)
    for loss in ("clip", "gspo", "cispo")
    for mean in ("tokens", "rows", "groups", 7.0)
    for kl in (WITHOUT_KL, KLTerm(coefficient=0.3), KLTerm(coefficient=0.3, estimator="k2"))
}
seeds = st.integers(0, 10_000)


def rows(seed, num_rows=8, width=5, by_row=True, out=()):
    """A batch in float64 with all that the losses may read, groups anywhere, and new log-probabilities near the old."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape, scale=1.0):
        return scale * torch.randn(*shape, generator=generator).double()

    mask = (torch.arange(width) < torch.randint(1, width + 1, (num_rows, 1), generator=generator)).double()
    weights = torch.tensor([0.0 if row in out else 1.0 for row in range(num_rows)]).double()
    groups = torch.randint(0, 3, (num_rows,), generator=generator)
    tokens = mask.sum(1) * weights
    same = (groups[:, None] == groups).double()
    batch = {
        "mask": mask,
        "logprobs": (draw(num_rows, width) - 2) * mask,
        "advantages": (draw(num_rows, 1).expand(-1, width) if by_row else draw(num_rows, width)) * mask,
        REF: (draw(num_rows, width) - 2) * mask,
        "row_weights": weights,
        "group_tokens": same @ tokens,
        "group_rows": same @ (tokens > 0).double(),
    }
    return batch, (batch["logprobs"] + draw(num_rows, width, scale=0.3)) * mask, groups


def value_and_gradient(algo, batch, new, loss=grpo):
    new = new.clone().requires_grad_()
    terms = loss_sums(loss, new, batch, algo)
    terms.total.backward()
    return replace(terms, total=terms.total.detach()), new.grad


def mean_and_gradient(algo, batch, new):
    terms, gradient = value_and_gradient(algo, batch, new)
    return terms.total / terms.weight, gradient / terms.weight


def gradient_of(function, new):
    new = new.clone().requires_grad_()
    value = function(new)
    return value.detach(), torch.autograd.grad(value, new)[0]


@pytest.mark.parametrize("name", FAMILY)
@given(seed=seeds, parts=st.lists(st.integers(0, 3), min_size=8, max_size=8), out=st.sets(st.integers(0, 7)))
@settings(max_examples=10)
def test_however_rows_are_split_the_sums_add_up(name, seed, parts, out):
    """Into up to four parts, of any rows, groups torn, some rows out of the loss: total, weight, metrics, gradient."""
    algo, (batch, new, _) = FAMILY[name], rows(seed, by_row=False, out=out)
    whole, gradient = value_and_gradient(algo, batch, new)
    chosen = [torch.tensor(parts) == part for part in sorted(set(parts))]
    made = [value_and_gradient(algo, {k: v[part] for k, v in batch.items()}, new[part]) for part in chosen]
    assert torch.allclose(sum(terms.total for terms, _ in made), whole.total)
    assert torch.allclose(sum(terms.weight for terms, _ in made), whole.weight)
    for part, (_, part_gradient) in zip(chosen, made, strict=True):
        assert torch.allclose(part_gradient, gradient[part])
    for metric, value in whole.metrics.items():
        assert torch.allclose(sum(terms.metrics[metric] for terms, _ in made), value), metric


@pytest.mark.parametrize("name", FAMILY)
def test_a_row_of_weight_zero_has_no_effect(name):
    algo, (batch, new, _) = FAMILY[name], rows(3, out=(1, 4))
    terms, gradient = value_and_gradient(algo, batch, new)
    kept = batch["row_weights"] > 0
    left, left_gradient = value_and_gradient(algo, {key: values[kept] for key, values in batch.items()}, new[kept])
    assert torch.allclose(terms.total, left.total)
    assert torch.allclose(terms.weight, left.weight)
    assert torch.allclose(gradient[kept], left_gradient)
    assert gradient[~kept].eq(0).all()


@given(seed=seeds, out=st.sets(st.integers(0, 7), max_size=7))
@settings(max_examples=examples(30))
def test_each_mean_follows_its_definition(seed, out):
    """Row by row and group by group, in plain Python, of a loss that is minus the advantage: the ratio is 1."""
    batch, _, groups = rows(seed, by_row=False, out=out)
    losses = {
        row: [-float(a) for a, m in zip(batch["advantages"][row], batch["mask"][row], strict=True) if m]
        for row in range(8)
        if row not in out
    }
    by_group = {}
    for row, values in losses.items():
        by_group.setdefault(int(groups[row]), []).extend(values)
    every = [value for values in losses.values() for value in values]
    expected = {
        "tokens": sum(every) / len(every),
        "rows": sum(sum(values) / len(values) for values in losses.values()) / len(losses),
        "groups": sum(sum(values) / len(values) for values in by_group.values()) / len(by_group),
        7.0: sum(every) / 7 / len(losses),
    }
    for kind, value in expected.items():
        algo = GRPO(mean_over=kind, kl=WITHOUT_KL, clip_low=0.9, clip_high=9.0)
        assert float(mean_and_gradient(algo, batch, batch["logprobs"])[0]) == pytest.approx(value, abs=1e-9), kind


@given(seed=seeds, by_row=st.booleans(), weighted=st.booleans())
@settings(max_examples=examples(30))
def test_policy_losses_equal_trls(seed, by_row, weighted):
    """Value and gradient: grpo, dr_grpo, dapo with clip-higher, cispo; and gspo, where TRL's advantages are a row's."""
    batch, new, _ = rows(seed, by_row=by_row)
    if weighted:
        batch["importance"] = torch.rand(8, 5, generator=torch.Generator().manual_seed(seed)).double() * batch["mask"]
    renamed = {"mask": "mask", "logprobs": "old_per_token_logps", "advantages": "advantages"}
    theirs = {renamed[key]: batch[key] for key in renamed} | {"ref_per_token_logps": batch[REF]}
    if weighted:
        theirs["importance_sampling_ratio"] = batch["importance"]
    kl = KLTerm(coefficient=0.04)
    cases = [
        (GRPO(mean_over="rows", kl=kl), ("grpo", "token", 0.2, 0.2, 0.04)),
        (GRPO(mean_over=24, kl=kl), ("dr_grpo", "token", 0.2, 0.2, 0.04)),
        (GRPO(mean_over="tokens", clip_high=0.28, kl=WITHOUT_KL), ("dapo", "token", 0.2, 0.28, 0.0)),
        (GRPO(mean_over="tokens", loss="cispo", kl=kl), ("cispo", "token", 0.2, 5.0, 0.04)),
    ]
    if by_row and not weighted:
        cases += [
            (GRPO(loss="gspo", kl=kl), ("grpo", "sequence", 3e-4, 4e-4, 0.04)),
            (GRPO(loss="gspo", clip_low=0.1, clip_high=0.2, kl=kl), ("grpo", "sequence", 0.1, 0.2, 0.04)),
        ]
    for algo, case in cases:
        value, gradient = mean_and_gradient(algo, batch, new)
        their_value, their_gradient = gradient_of(lambda new: trl.grpo_loss(theirs, new, *case, 24), new)  # noqa: B023
        assert torch.allclose(value, their_value, rtol=0, atol=1e-6), case
        assert torch.allclose(gradient, their_gradient, rtol=0, atol=1e-6), case


@given(seed=seeds, out=st.sets(st.integers(0, 7), max_size=6))
@settings(max_examples=examples(30))
def test_gspo_cispo_and_means_equal_verls(seed, out):
    """With advantages that differ by token, as with KL in the reward, and rows masked altogether."""
    batch, new, _ = rows(seed, by_row=False, out=out)
    mask = batch["mask"] * batch["row_weights"][:, None]
    old, advantages = batch["logprobs"], batch["advantages"]
    losses = {
        "gspo": lambda new: verl.compute_policy_loss_gspo(new, old, advantages, mask, 0.1, 0.2),
        "cispo": lambda new: verl.compute_policy_loss_cispo(new, old, advantages, 0.1, 0.2),
    }
    means = {"tokens": "token-mean", "rows": "seq-mean-token-mean", 24.0: "seq-mean-token-sum-norm"}
    for name, loss in losses.items():
        for ours, theirs in means.items():
            algo = GRPO(loss=name, clip_low=0.1, clip_high=0.2, mean_over=ours, kl=WITHOUT_KL)
            value, gradient = mean_and_gradient(algo, batch, new)
            expected = gradient_of(lambda new: verl.agg_loss(loss(new), mask, theirs, 24), new)  # noqa: B023
            assert torch.allclose(value, expected[0], rtol=0, atol=1e-6), (name, ours)
            assert torch.allclose(gradient, expected[1], rtol=0, atol=1e-6), (name, ours)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@given(seed=seeds)
@settings(max_examples=10)
def test_kl_estimates_equal_verls(estimator, seed):
    batch, new, _ = rows(seed)
    expected = verl.kl_penalty_forward(new, batch[REF], estimator)
    made = kl_estimate(new, batch[REF], estimator)
    assert torch.allclose(made.clamp(-10, 10), expected.clamp(-10, 10), rtol=0, atol=1e-6)


def one_row(ratios, advantages, **more):
    """New log-probabilities and a batch of one row, of which the old ones are 0 (so gradients are those of log r)."""
    new = torch.tensor([[math.log(ratio) for ratio in ratios]], dtype=torch.float64)
    batch = {"logprobs": torch.zeros_like(new), "advantages": torch.tensor([advantages]).double()}
    return new, batch | {"mask": torch.ones_like(new)} | {
        key: torch.tensor([row]).double() for key, row in more.items()
    }


def test_clip_higher_by_hand():
    """Bounds 0.8 and 1.5: gains min(1.4, 1.4), min(1.6, 1.5), min(-0.5, -0.8): the mean of 1.4, 1.5, -0.8 is 0.7."""
    new, batch = one_row([1.4, 1.6, 0.5], [1.0, 1.0, -1.0])
    algo = GRPO(clip_high=0.5, kl=WITHOUT_KL)
    terms, gradient = value_and_gradient(algo, batch, new)
    assert float(terms.total) == pytest.approx(-0.7)
    assert gradient.flatten().tolist() == pytest.approx([-1.4 / 3, 0, 0])
    assert float(terms.metrics["clip_fraction"]) == pytest.approx(2 / 3)
    assert float(terms.metrics["ratio"]) == pytest.approx(3.5 / 3)


def test_gspo_by_hand():
    """Ratios 4 and 1: s = sqrt(4) = 2. Advantage 3, no clip: gain 6; each token's gradient is s * A / 2 = 3."""
    new, batch = one_row([4.0, 1.0], [3.0, 3.0])
    terms, gradient = value_and_gradient(GRPO(loss="gspo", clip_high=1.5, kl=WITHOUT_KL), batch, new)
    assert float(terms.total) == pytest.approx(-6)
    assert gradient.flatten().tolist() == pytest.approx([-3, -3])
    clipped, gradient = value_and_gradient(GRPO(loss="gspo", clip_high=0.5, kl=WITHOUT_KL), batch, new)
    assert float(clipped.total) == pytest.approx(-4.5)
    assert gradient.eq(0).all()
    assert float(clipped.metrics["clip_fraction"]) == 1


def test_cispo_by_hand():
    """Weights min(8, 5) and min(0.5, 5), advantages 1 and -2: gradients -5 and 1, halved by the mean over 2 tokens."""
    new, batch = one_row([8.0, 0.5], [1.0, -2.0])
    terms, gradient = value_and_gradient(GRPO(loss="cispo", kl=WITHOUT_KL), batch, new)
    assert gradient.flatten().tolist() == pytest.approx([-2.5, 0.5])
    assert float(terms.total) == pytest.approx((-5 * math.log(8) + math.log(0.5)) / 2)
    assert float(terms.metrics["clip_fraction"]) == 0.5


def test_means_by_hand():
    """Losses (1, 2, 3) and (4) of one group, (8) of another.
    Tokens 18/5; rows (2 + 4 + 8)/3; groups (10/4 + 8)/2; constant 4: (6/4 + 4/4 + 8/4)/3."""
    mask = torch.tensor([[1.0, 1, 1], [1, 0, 0], [1, 0, 0]]).double()
    batch = {
        "mask": mask,
        "logprobs": 0 * mask,
        "advantages": -torch.tensor([[1.0, 2, 3], [4, 9, 9], [8, 9, 9]]).double(),
        "group_tokens": torch.tensor([4.0, 4, 1]).double(),
        "group_rows": torch.tensor([2.0, 2, 1]).double(),
    }
    for kind, expected in {"tokens": 18 / 5, "rows": 14 / 3, "groups": 5.25, 4.0: 1.5}.items():
        made, _ = mean_and_gradient(GRPO(mean_over=kind, kl=WITHOUT_KL), batch, 0 * mask)
        assert float(made) == pytest.approx(expected), kind


def test_the_kl_term_by_hand():
    """Reference probabilities are e^-0.5 of the policy's: k3 is e^-0.5 - 1 + 0.5, k2 0.125; two tokens."""
    new, batch = one_row([1.0, 1.0], [0.0, 0.0], **{REF: [-0.5, -0.5]})
    for estimator, kl in {"k3": math.exp(-0.5) - 0.5, "k2": 0.125}.items():
        terms, _ = value_and_gradient(GRPO(kl=KLTerm(coefficient=0.1, estimator=estimator)), batch, new)
        assert float(terms.total) == pytest.approx(0.1 * kl)
        assert float(terms.metrics["kl"]) == pytest.approx(2 * kl)  # of a response
        assert float(terms.metrics["kl_per_token"]) == pytest.approx(kl)


def test_with_coefficient_0_the_kl_is_only_a_metric():
    """It adds nothing to the loss, and nothing to its gradient."""
    new, batch = one_row([1.0, 1.0], [0.0, 0.0], **{REF: [-0.5, -0.5]})
    terms, gradient = value_and_gradient(GRPO(kl=WITHOUT_KL), batch, new)
    assert float(terms.metrics["kl_per_token"]) == pytest.approx(math.exp(-0.5) - 0.5)
    plain, same = value_and_gradient(GRPO(kl=WITHOUT_KL), {name: batch[name] for name in batch if name != REF}, new)
    assert float(terms.total) == float(plain.total) and gradient.equal(same)


@pytest.mark.parametrize("kl", [WITHOUT_KL, KLTerm(place="reward", estimator="k1")])
def test_without_a_kl_term_no_reference_is_read(kl):
    new, batch = one_row([1.0], [1.0])
    terms = loss_sums(grpo, new, batch, GRPO(kl=kl))
    assert not {"kl", "kl_per_token"} & terms.metrics.keys()
    with pytest.raises(NoSuchColumn, match=REF):
        loss_sums(grpo, new, batch, GRPO())


def test_importance_weights_the_policy_term_and_not_the_kl_term():
    new, batch = one_row([1.0, 1.0], [1.0, 1.0], importance=[0.5, 0.0], **{REF: [-0.5, -0.5]})
    terms, _ = value_and_gradient(GRPO(kl=KLTerm(coefficient=1.0, estimator="k2")), batch, new)
    assert float(terms.total) == pytest.approx(-0.25 + 0.125)
    terms, _ = value_and_gradient(PPO(), batch, new, loss=ppo_clip)
    assert float(terms.total / terms.weight) == pytest.approx(-0.25)


def test_a_requested_correction_without_weights_is_refused():
    new, batch = one_row([1.0], [1.0])
    algo = GRPO(kl=WITHOUT_KL, old_logprobs="recompute", importance=Importance())
    with pytest.raises(NoSuchColumn, match="importance"):
        loss_sums(grpo, new, batch, algo)


def test_metrics_measure_the_distance_from_the_old_policy():
    """Ratio 2 at one of two tokens: k3 of new and old 2 - 1 - log 2."""
    new, batch = one_row([2.0, 1.0], [1.0, 1.0])
    metrics = loss_sums(grpo, new, batch, GRPO(kl=WITHOUT_KL)).metrics
    expected = {"clip_fraction": 0.5, "approx_kl": (1 - math.log(2)) / 2, "ratio": 1.5}
    expected |= {"change": math.log(2) / 2, "entropy": -math.log(2) / 2}
    assert {name: float(value) for name, value in metrics.items()} == pytest.approx(expected)


@pytest.mark.parametrize("kind", ["tokens", "rows", "groups", 7.0])
def test_a_constant_metric_is_unchanged_by_every_mean(kind):
    """Also where a constant divides the loss: its metrics are means over rows."""
    batch, _, _ = rows(5, out=(2,))
    terms = loss_sums(grpo, batch["logprobs"], batch, GRPO(mean_over=kind, kl=WITHOUT_KL))
    assert float(terms.metrics["ratio"] / terms.weight) == pytest.approx(1)
