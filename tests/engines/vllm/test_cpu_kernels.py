"""The kernels of vLLM's engine on a CPU, in bfloat16: each result is rounded once, to the nearest number."""

import pytest
import torch
import vllm_cases
from processors import no_bfloat16
from torch.nn.functional import rms_norm
from vllm.model_executor.layers.layernorm import RMSNorm

from prefect_rlhf.engines.vllm.cpu import kernels
from prefect_rlhf.engines.vllm.engine import VllmEngine

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def norms(tmp_path_factory):
    folder = vllm_cases.make_folder(tmp_path_factory.mktemp("model"), 1, tied=True)
    engine = VllmEngine(vllm_cases.build_command(folder, tied=True, dtype="bfloat16"), 0)
    yield [module for module in engine._runner.get_model().modules() if isinstance(module, RMSNorm)]
    engine.close()


def assert_rounded(found, exact):
    """Near, and neither smaller nor larger on average: cut digits would make it 0.3% smaller."""
    assert found.dtype == torch.bfloat16
    shares = (found.double().abs() / exact.abs() - 1)[exact != 0]
    assert shares.abs().max() <= 2**-7
    assert abs(shares.mean()) < 2e-4


def test_a_norm_rounds_its_results(norms):
    """vLLM's build for AVX2 cuts digits, so that every layer makes its output a little smaller."""
    torch.manual_seed(0)
    assert norms
    for norm in norms:
        x, residual = (torch.randn(256, norm.hidden_size).bfloat16() for _ in range(2))
        weight, eps = norm.weight.double(), norm.variance_epsilon
        assert_rounded(norm(x.clone()), rms_norm(x.double(), x.shape[-1:], weight, eps))
        made, summed = norm(x.clone(), residual.clone())
        exact = x.double() + residual.double()
        assert_rounded(summed, exact)
        assert_rounded(made, rms_norm(summed.double(), x.shape[-1:], weight, eps))


@pytest.mark.parametrize(("made", "cuts"), [(1.0, False), (0.99609375, True)])
def test_a_build_that_cuts_digits_is_known_by_its_result(monkeypatch, made, cuts):
    monkeypatch.setattr(torch.ops._C, "rms_norm", lambda out, *_: out.fill_(made))
    assert kernels.cuts_digits.__wrapped__() is cuts


@pytest.mark.parametrize("shape", [(3, 72), (5, 72), (2, 3, 72)])
def test_a_layer_that_is_not_packed_computes_what_torch_does(shape):
    """With its bias, of few and of many tokens, in one axis or two."""
    torch.manual_seed(0)
    x, weight, bias = torch.randn(shape).bfloat16(), torch.randn(40, 72).bfloat16(), torch.randn(40).bfloat16()
    with no_bfloat16():
        made = kernels._linear(x, weight, bias)
        if x.shape[:-1].numel() >= 4:  # fewer are torch's own product, which rounds once with its bias
            assert torch.equal(kernels._linear(x, weight, None) + bias, made)
    exact = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    assert made.dtype == torch.bfloat16
    assert torch.allclose(made.double(), exact, rtol=2**-7, atol=2**-5)
