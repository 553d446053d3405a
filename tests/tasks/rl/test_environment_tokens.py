"""An environment's tokens: each loss is that of the rows without them, and these tokens have no gradient."""

import pytest
import torch

from prefect_rlhf.tasks.rl.losses import bradley_terry
from tests.tasks.rl.every_loss import every_loss, units_of
from tests.tasks.rl.loss_sums import loss_sums

pytestmark = pytest.mark.quick

OF_TOKENS = [case for case in every_loss() if case.values[0] is not bradley_terry]  # which reads a score of each row


def wider(column_BT, places_BT, width, size, random):
    """Put each row's tokens at ascending places of longer rows; random numbers are at the other places."""
    junk = size * torch.randn(len(column_BT), width, dtype=column_BT.dtype, generator=random)
    return junk.scatter(1, places_BT, column_BT)


@pytest.mark.parametrize("size", [3, 3000])  # exp(3000) is infinite, and 0 times its slope not a number
@pytest.mark.parametrize(("operator", "algo", "output", "batch"), OF_TOKENS)
def test_environment_tokens_change_no_loss_and_no_gradient(operator, algo, output, batch, size):
    num_rows, length = output.shape
    width = 2 * length + 1
    random = torch.Generator().manual_seed(3)
    places_BT = torch.stack([torch.randperm(width, generator=random)[:length] for _ in range(num_rows)]).sort(1).values
    alone = output.detach().double().requires_grad_()
    expected = loss_sums(operator, alone, batch, algo, **units_of(operator))
    expected.total.backward()

    among = wider(output.detach().double(), places_BT, width, size, random).requires_grad_()
    columns = {
        key: wider(each, places_BT, width, size, random) if each.shape == output.shape else each
        for key, each in batch.items()
    }
    columns["mask"] = torch.zeros(num_rows, width).double().scatter(1, places_BT, batch["mask"])
    found = loss_sums(operator, among, columns, algo, **units_of(operator))
    found.total.backward()

    assert found.total.item() == pytest.approx(expected.total.item(), rel=1e-12, abs=1e-12)
    assert found.weight == expected.weight
    assert {name: float(each) for name, each in found.metrics.items()} == pytest.approx(
        {name: float(each) for name, each in expected.metrics.items()}, rel=1e-9, abs=1e-12
    )
    assert torch.allclose(among.grad.gather(1, places_BT), alone.grad, rtol=1e-12, atol=1e-12)
    assert alone.grad.abs().sum() > 0
    assert not (among.grad * (1 - columns["mask"])).any()
