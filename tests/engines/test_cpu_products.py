"""Products of bfloat16 in float32: rounded once, only from as many tokens on as repay it, by the processor's kind."""

from types import SimpleNamespace

import pytest
import torch

from prefect_rlhf.engines import cpu_products
from prefect_rlhf.engines.cpu_products import added_product, product

FEWEST, INPUTS, OUTPUTS = 16, 72, 40


@pytest.fixture(autouse=True)
def float32_is_faster(monkeypatch):
    monkeypatch.setattr(cpu_products, "fewest_tokens", lambda: FEWEST)


def operands(tokens=FEWEST, outputs=OUTPUTS):
    torch.manual_seed(0)
    return torch.randn(tokens, INPUTS).bfloat16(), torch.randn(outputs, INPUTS).bfloat16()


@pytest.mark.parametrize("sizes", [(FEWEST, OUTPUTS), (2500, OUTPUTS), (FEWEST, 2500), (2500, 2500)])
def test_a_product_is_the_exact_one_rounded_once(sizes):
    """Also in several blocks of tokens and of columns."""
    values, weight = operands(*sizes)
    exact = values.double() @ weight.double().t()
    found = product(values, weight.t())
    assert found.dtype == torch.bfloat16
    assert (found - exact).abs().max() <= 1.01 * (exact.bfloat16() - exact).abs().max()


def test_few_tokens_and_other_formats_use_torchs_own_product(monkeypatch):
    wide = []
    monkeypatch.setattr(torch, "mm", lambda *_, **__: wide.append(1))
    values, weight = operands(FEWEST - 1)
    assert torch.equal(product(values, weight.t()), values @ weight.t())
    many, _ = operands()
    assert torch.equal(product(many.float(), weight.t().float()), many.float() @ weight.t().float())
    monkeypatch.setattr(cpu_products, "fewest_tokens", lambda: None)
    assert torch.equal(product(many, weight.t()), many @ weight.t())
    assert not wide


def test_an_added_product_is_rounded_once_and_has_exact_gradients():
    """Rounding the product before it is added would lose half of its digits here, since the total is larger."""
    values, weight = operands()
    total = (100 * torch.randn(FEWEST, OUTPUTS)).bfloat16()
    given = [each.requires_grad_() for each in (total, values, weight)]
    found = added_product(total, values, weight.t(), 0.5)
    exact = total.double() + 0.5 * values.double() @ weight.double().t()
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, exact.bfloat16())
    found.sum().backward()
    assert torch.equal(given[0].grad, torch.ones_like(total))
    assert torch.equal(given[1].grad, (0.5 * weight.double().sum(0)).bfloat16().expand_as(values))
    assert torch.equal(given[2].grad, (0.5 * values.double().sum(0)).bfloat16().expand_as(weight))


NO_AVX512 = dict.fromkeys(["avx512_bw", "avx512_bf16", "amx_bf16", "avx_ne_convert"], False)
XEON, EPYC = {"cpu_name": "Intel Xeon"}, {"cpu_name": "AMD EPYC 9354"}


@pytest.mark.parametrize(
    ("found", "fewest", "has_bfloat16"),
    [
        (XEON | {"avx512_bw": True, "avx512_bf16": True, "amx_bf16": True}, None, True),
        (XEON | {"avx512_bw": True, "avx512_bf16": True}, 96, True),
        (XEON | {"avx512_bw": True}, 96, True),
        (EPYC | {"avx512_bw": True, "avx512_bf16": True}, None, True),
        ({"cpu_name": "AMD EPYC 7763"}, 4, False),
        ({"cpu_name": "Intel Core i7-13700"}, 4, False),
        ({"cpu_name": "Intel Core Ultra 7 258V", "avx_ne_convert": True}, 96, True),
        ({"architecture": "aarch64"}, None, True),
    ],
)
def test_float32_is_chosen_by_the_processors_instructions(monkeypatch, found, fewest, has_bfloat16):
    monkeypatch.undo()
    known = {"architecture": "x86_64"} | NO_AVX512 | found
    monkeypatch.setattr(torch, "cpu", SimpleNamespace(get_capabilities=lambda: known))
    functions = cpu_products.fewest_tokens, cpu_products.has_bfloat16
    for function in functions:
        function.cache_clear()
    try:
        assert [function() for function in functions] == [fewest, has_bfloat16]
    finally:
        for function in functions:
            function.cache_clear()
