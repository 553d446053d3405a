"""Attention to a sliding window on CUDA: the numbers of transformers, no mask or scores of all pairs of tokens."""

import family_cases
import megatron_cases as cases
import pytest
import torch
import torch.nn.functional as F
from megatron_cases import OPTIMIZER, Case
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from prefect_rlhf.engines.engine import Sequences
from prefect_rlhf.engines.megatron import fused
from prefect_rlhf.placement.models.engine_constants import window_block
from tests.support.pretend_gpu import pretend_gpu

WINDOW, LENGTH = 20, 300  # more than a block of queries, which has at least 256


def heads(length, *, groups=2, shared=3, dim=16):
    query = torch.randn(2, groups * shared, length, dim, requires_grad=True)
    return query, *(torch.randn(2, groups, length, dim, requires_grad=True) for _ in range(2))


@pytest.mark.parametrize(
    ("length", "window", "shared"), [(13, 5, 3), (LENGTH, WINDOW, 3), (257, 256, 4), (700, 300, 1), (2500, 1500, 2)]
)
def test_blocks_give_the_same_as_a_full_mask(length, window, shared):
    inputs = heads(length, shared=shared)
    expected, found = fused.attention(*inputs, window), fused.window_attention(*inputs, window)
    assert torch.allclose(found, expected, atol=1e-6)
    towards = torch.randn_like(expected)
    for mine, theirs in zip(
        torch.autograd.grad(found, inputs, towards), torch.autograd.grad(expected, inputs, towards), strict=True
    ):
        assert torch.allclose(mine, theirs, atol=1e-5)


class Largest(TorchDispatchMode):
    """The elements of the largest tensor that an operation makes, per row."""

    def __init__(self, rows):
        super().__init__()
        self.rows, self.elements = rows, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for each in made if isinstance(made, tuple) else [made]:
            if isinstance(each, torch.Tensor):
                self.elements = max(self.elements, each.numel())
        return made


def test_no_tensor_grows_with_the_square_of_the_tokens():
    """Forward and backward, with the kernel of CPU that keeps no scores, as the memory-efficient kernel of CUDA."""

    def largest(function, length):
        inputs = heads(length, groups=1, shared=1, dim=4)
        with Largest(2) as seen:
            function(*inputs, 64).sum().backward()
        return seen.elements

    size, reach = window_block(64)
    fused._window_mask.cache_clear()
    assert largest(fused.window_attention, 4096) <= max(size * (reach + size), 2 * 4096 * 4)
    assert largest(fused.attention, 4096) >= 4096**2


def test_the_memory_efficient_kernel_may_run(monkeypatch):
    """It refuses shared keys, and keys of another number of heads."""
    given = []

    def attend(query, key, value, **options):
        assert "enable_gqa" not in options and query.shape[1] == key.shape[1] == value.shape[1]
        assert options["attn_mask"].shape == (query.shape[2], key.shape[2])
        assert options["attn_mask"].dtype == query.dtype and options["attn_mask"].stride(0) % 16 == 0
        given.append(options["attn_mask"].untyped_storage().data_ptr())
        return attended(query, key, value, **options)

    attended = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", attend)
    for _ in range(2):
        fused.window_attention(*heads(3 * LENGTH), WINDOW)
    assert len(given) == 8 and len(set(given)) == 1  # four blocks each; autograd keeps a single mask


def test_pretend_gpu_logprobs_match_transformers(tmp_path):
    """Gemma 3, rows of several blocks, of unlike lengths."""
    folder = family_cases.make_family(
        tmp_path / "gemma", "gemma3_text", 2, sliding_window=WINDOW, max_position_embeddings=512
    )
    lengths = torch.tensor([LENGTH, LENGTH - 31])
    tokens = torch.randint(3, cases.VOCAB, (2, LENGTH))
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(tokens).logits
    expected = logits.log_softmax(-1)[:, :-1].gather(-1, tokens[:, 1:, None])[..., 0]
    with pretend_gpu():
        engine = Case(folder, optimizer=OPTIMIZER).build(0)
        found = engine.infer(Sequences(tokens, torch.tensor([1, 1]), lengths), "logprobs", 1, 1.0).cpu()
    for row, length in enumerate(lengths.tolist()):
        assert torch.allclose(found[row, : length - 1], expected[row, : length - 1], atol=1e-3)
