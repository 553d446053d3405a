"""Megatron's linear layers in float32: the same outputs and gradients, gradients of weights in float32."""

import pytest
import torch
from megatron.core.tensor_parallel import layers

from prefect_rlhf.engines import cpu_products
from prefect_rlhf.engines.megatron.cpu import products
from prefect_rlhf.engines.megatron.gradients import mark_stale

TOKENS, INPUTS, OUTPUTS = 9, 72, 40
OPTIONS = {"gradient_accumulation_fusion": True, "allreduce_dgrad": False, "sequence_parallel": False, "tp_group": None}


@pytest.fixture(autouse=True)
def float32_is_faster(monkeypatch):
    monkeypatch.setattr(cpu_products, "fewest_tokens", lambda: TOKENS)


def operands(tokens=TOKENS):
    torch.manual_seed(0)
    return torch.randn(tokens, INPUTS).bfloat16(), torch.randn(OUTPUTS, INPUTS).bfloat16()


def weight_with_buffer(weight, content):
    weight = weight.clone().requires_grad_()
    weight.main_grad = torch.full(weight.shape, content)
    return weight


@pytest.mark.parametrize("is_stale", [True, False])
def test_a_linear_layer_has_megatrons_output_and_gradients(is_stale):
    values, plain = operands()
    above = torch.randn(TOKENS, 1, OUTPUTS).bfloat16()
    weight = weight_with_buffer(plain, 7.0 if is_stale else 0.5)
    if is_stale:
        mark_stale(weight.main_grad)
    inputs = values[:, None].clone().requires_grad_()
    made = products._linear(layers.linear_with_frozen_weight, inputs, weight, None, **OPTIONS)
    made.backward(above)
    exact = {
        "made": values.double() @ plain.double().t(),
        "inputs": above[:, 0].double() @ plain.double(),
        "weight": above[:, 0].double().t() @ values.double() + (0.0 if is_stale else 0.5),
    }
    found = {"made": made[:, 0], "inputs": inputs.grad[:, 0], "weight": weight.main_grad}
    for name, tolerance in (("made", 2**-8), ("inputs", 2**-8), ("weight", 1e-5)):
        assert torch.allclose(found[name].double(), exact[name], rtol=tolerance, atol=tolerance), name
    assert weight.grad_added_to_main_grad
    assert weight.grad is None


def test_a_weight_without_a_buffer_has_its_gradient_from_autograd():
    values, plain = operands()
    weight = plain.clone().requires_grad_()
    products._linear(layers.linear_with_frozen_weight, values, weight, None, **OPTIONS).sum().backward()
    assert torch.equal(weight.grad, values.float().sum(0).bfloat16().expand_as(weight))


def test_an_adapters_gradient_is_left_to_autograd():
    """Autograd adds it to the buffer. Added here as well, it would count twice."""
    values, plain = operands()
    weight = weight_with_buffer(plain, 0.5)
    weight.is_adapter = True
    products.linear(values, weight).sum().backward()
    assert torch.equal(weight.grad, values.float().sum(0).bfloat16().expand_as(weight))
    assert (weight.main_grad == 0.5).all()


@pytest.mark.parametrize("tokens", [TOKENS - 1, TOKENS])
def test_a_linear_function_is_torchs_with_its_gradients(tokens):
    """Few tokens are torch's own product bit for bit; of many the result and both gradients are rounded once."""
    values, weight = operands(tokens)
    found, expected = [], []
    for function, made in ((products.linear, found), (torch.nn.functional.linear, expected)):
        both = values.clone().requires_grad_(), weight.clone().requires_grad_()
        result = function(*both)
        result.backward(torch.ones_like(result))
        made += [result, both[0].grad, both[1].grad]
    for ours, torchs in zip(found, expected, strict=True):
        assert ours.dtype == torch.bfloat16
        assert torch.equal(ours, torchs) if tokens < TOKENS else torch.allclose(ours, torchs, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("is_stale", [True, False])
def test_a_weights_gradient_is_added_block_by_block(is_stale):
    """Only the first block of tokens replaces what a stale buffer holds."""
    values, _ = operands(2 * cpu_products.AT_ONCE + 5)
    above = torch.randn(len(values), OUTPUTS).bfloat16()
    buffer = torch.full((OUTPUTS, INPUTS), float("nan") if is_stale else 0.5)
    if is_stale:
        mark_stale(buffer)
    products.add_weight_product(buffer, above, values)
    exact = above.double().t() @ values.double() + (0.0 if is_stale else 0.5)
    assert torch.allclose(buffer.double(), exact, rtol=1e-5, atol=1e-3)
