"""Attention on CUDA leaves cuDNN's kernel out; on the CPU nothing is chosen."""

import pytest
import torch
import torch.nn.functional as F
from megatron_cases import OPTIMIZER, VOCAB, Case, make_folder
from torch.backends.cuda import cudnn_sdp_enabled, enable_cudnn_sdp

from prefect_rlhf.engines.engine import SamplingSettings, Sequences
from prefect_rlhf.engines.megatron import fused
from tests.support.pretend_gpu import pretend_gpu


@pytest.fixture(autouse=True)
def torchs_own_choice():
    enable_cudnn_sdp(True)
    yield
    enable_cudnn_sdp(True)


@pytest.fixture
def enabled(monkeypatch):
    """Whether cuDNN's kernel is enabled, at each attention."""
    seen, attend = [], F.scaled_dot_product_attention

    def note(*tensors, **options):
        seen.append(cudnn_sdp_enabled())
        return attend(*tensors, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", note)
    return seen


def test_no_attention_on_cuda_of_inference_or_decoding_may_take_cudnn_s_kernel(tmp_path, enabled):
    folder = make_folder(tmp_path / "model")
    with pretend_gpu():
        engine = Case(folder, optimizer=OPTIMIZER).build(0)
        engine.infer(
            Sequences(torch.randint(3, VOCAB, (2, 8)), torch.tensor([1, 1]), torch.tensor([8, 7])), "logprobs", 1, 1.0
        )
        inferred = len(enabled)
        enable_cudnn_sdp(True)
        engine.generate([[3, 4], [5]], SamplingSettings(max_new_tokens=3), [1, 2])
    assert 0 < inferred < len(enabled) and not any(enabled)


def test_no_attention_is_chosen_on_cpu(enabled):
    query, keys = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8)
    fused.attention(query, keys, keys, None)
    assert enabled == [True] and cudnn_sdp_enabled()
