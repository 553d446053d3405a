"""Each loss in float32, on the device of RLHF_TEST_DEVICE, against float64 on the host."""

import pytest
import torch

from tests.support.device import DEVICE
from tests.support.rounding import MODEL, within
from tests.tasks.rl.every_loss import every_loss, units_of
from tests.tasks.rl.loss_sums import loss_sums

pytestmark = [pytest.mark.quick, pytest.mark.gpu]


def as_float32(tensor):
    tensor = tensor.to(torch.float32) if tensor.is_floating_point() else tensor
    return tensor.to(DEVICE)


@pytest.mark.parametrize(("operator", "algo", "output", "batch"), list(every_loss()))
def test_a_loss_has_the_value_and_gradient_of_float64(operator, algo, output, batch):
    exact = output.detach().double().requires_grad_()
    expected = loss_sums(operator, exact, batch, algo, **units_of(operator))
    expected.total.backward()
    rounded = as_float32(output.detach()).requires_grad_()
    columns = {name: as_float32(column) for name, column in batch.items()}
    found = loss_sums(operator, rounded, columns, algo, **units_of(operator))
    found.total.backward()
    assert found.total.item() == within(MODEL, expected.total.item())
    assert rounded.grad.flatten().tolist() == within(MODEL, exact.grad.flatten(), size=0.1)
