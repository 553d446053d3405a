"""Products of bfloat16 in float32: no less accurate, only for many tokens, gradients of weights in float32."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.tensor_parallel import layers

from prefect_rlhf.engines.megatron.cpu import products
from prefect_rlhf.engines.megatron.gradients import mark_stale

TOKENS, INPUTS, OUTPUTS = products.FEWEST_TOKENS + 5, 72, 40
OPTIONS = {"gradient_accumulation_fusion": True, "allreduce_dgrad": False, "sequence_parallel": False, "tp_group": None}


@pytest.fixture(autouse=True)
def float32_is_faster(monkeypatch):
    monkeypatch.setattr(products, "is_float32_faster", lambda: True)


def operands(tokens=TOKENS):
    torch.manual_seed(0)
    return torch.randn(tokens, INPUTS).bfloat16(), torch.randn(OUTPUTS, INPUTS).bfloat16()


def weight_with_buffer(weight, content):
    weight = weight.clone().requires_grad_()
    weight.main_grad = torch.full(weight.shape, content)
    return weight


def test_a_product_is_the_exact_one_rounded_once():
    values, weight = operands()
    exact = values.double() @ weight.double().t()
    found = products.product(values, weight.t())
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, (values.float() @ weight.float().t()).bfloat16())
    assert (found - exact).abs().max() <= 1.01 * (exact.bfloat16() - exact).abs().max()


def test_few_tokens_and_other_processors_use_torchs_own_product(monkeypatch):
    wide = []
    monkeypatch.setattr(torch, "mm", lambda *_, **__: wide.append(1))
    values, weight = operands(products.FEWEST_TOKENS - 1)
    assert torch.equal(products.product(values, weight.t()), values @ weight.t())
    monkeypatch.setattr(products, "is_float32_faster", lambda: False)
    many, _ = operands()
    assert torch.equal(products.product(many, weight.t()), many @ weight.t())
    assert torch.equal(products.product(many.float(), weight.t().float()), many.float() @ weight.t().float())
    assert not wide


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


@pytest.mark.parametrize(
    ("found", "is_faster"),
    [
        ({"amx_bf16": True, "avx512_bf16": True, "cpu_name": "Intel Xeon"}, False),
        ({"amx_bf16": False, "avx512_bf16": True, "cpu_name": "Intel Xeon"}, True),
        ({"amx_bf16": False, "avx512_bf16": True, "cpu_name": "AMD EPYC 9354"}, False),
        ({"amx_bf16": False, "avx512_bf16": False, "cpu_name": "AMD EPYC 7763"}, True),
        ({"architecture": "aarch64"}, False),
    ],
)
def test_float32_is_chosen_by_the_processors_instructions(monkeypatch, found, is_faster):
    monkeypatch.undo()
    monkeypatch.setattr(torch, "cpu", SimpleNamespace(get_capabilities=lambda: {"architecture": "x86_64"} | found))
    products.is_float32_faster.cache_clear()
    try:
        assert products.is_float32_faster() is is_faster
    finally:
        products.is_float32_faster.cache_clear()
