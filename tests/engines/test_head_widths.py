"""The widths of heads that engines are said to compute are those that they compute."""

import family_cases
import pytest
import torch
from megatron_cases import Case
from vllm import _custom_ops as ops
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm_cases import Oracle

from prefect_rlhf.engines.commands import BuildCommand
from prefect_rlhf.engines.engine import SamplingSettings
from prefect_rlhf.engines.files.huggingface import read_model_spec
from prefect_rlhf.engines.vllm.engine import VllmEngine
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.devices.mesh import DeviceMesh
from prefect_rlhf.placement.devices.strategy import Strategy
from prefect_rlhf.placement.engine_traits import TRAITS, refused_heads
from prefect_rlhf.placement.models.engine_constants import CACHE_BLOCK
from prefect_rlhf.placement.plan import ModelInstance
from tests.support.layouts import vllm_layout

pytestmark = pytest.mark.slow
SEEDS = range(3)
PROMPTS = [[7 * row + place + 1 for place in range(6)] for row in SEEDS]
SAMPLED = SamplingSettings(40, stop_at_eos=False)
ON_CPU = next(widths.listed for widths in TRAITS["vllm"].head_widths if widths.backend == "cpu")
BRIEFLY = (48, 80, 512)
"""Widths whose kernels differ; the others are in `make test-all`."""


def vllm(folder: str) -> VllmEngine:
    spec, strategy = read_model_spec("actor", folder, "lm", dtype="float32"), Strategy()
    instance = ModelInstance("actor", "vllm", DeviceMesh(0, 1, 0, 1), strategy)
    return VllmEngine(BuildCommand(spec, instance, (0,), vllm_layout(spec, strategy, (0,)), 64, max_rows=4), 0)


def check(folder: str, engine) -> None:
    """Log-probabilities are those of transformers."""
    made, oracle = engine.generate(PROMPTS, SAMPLED, SEEDS), Oracle(folder)
    for prompt, response, logprobs in zip(PROMPTS, made.tokens, made.logprobs, strict=True):
        assert oracle.logprobs(prompt, response, 1.0) == pytest.approx(logprobs, abs=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_vllm_has_cpu_kernels_for_exactly_the_listed_widths(dtype):
    current_platform.import_kernels()

    def has_kernel(width: int) -> bool:
        try:
            ops.cpu_attn_get_scheduler_metadata(
                num_reqs=1, num_heads=2, num_kv_heads=1, head_dim=width, seq_lens=torch.tensor([4], dtype=torch.int32),
                dtype=dtype, query_start_loc=torch.tensor([0, 4], dtype=torch.int32), causal=True,
                sliding_window_size=-1, isa=_get_attn_isa(dtype, CACHE_BLOCK, width), enable_kv_split=True,
            )  # fmt: skip
        except RuntimeError as error:
            assert "Unsupported CPU attention configuration" in str(error)
            return False
        return True

    name = str(dtype).removeprefix("torch.")
    for width in range(2, 1026, 2):
        assert has_kernel(width) == (not refused_heads("vllm", width, name, "cpu")), width


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_listed_cuda_widths_are_those_of_flashattention_or_triton(dtype):
    """FlashInfer takes none besides; torch's flexible attention, vLLM's last choice, would be slow."""
    backends = TritonAttentionBackend, FlashAttentionBackend
    name = str(dtype).removeprefix("torch.")
    for width in range(2, 514, 2):
        takes = any(each.supports_dtype(dtype) and each.supports_head_size(width) for each in backends)
        assert takes == (not refused_heads("vllm", width, name, "cuda")), width


@pytest.mark.parametrize(
    "width", [width if width in BRIEFLY else pytest.param(width, marks=pytest.mark.all) for width in ON_CPU]
)
def test_vllm_computes_on_cpu_what_transformers_does_with_heads_so_wide(tmp_path, width):
    folder = family_cases.make_family(tmp_path, "llama", 3, head_dim=width)
    check(folder, vllm(folder))


@pytest.mark.parametrize("width", [2, 6, 16, 600])
def test_megatron_takes_every_even_width(tmp_path, width):
    folder = family_cases.make_family(tmp_path, "llama", 3, head_dim=width)
    assert TRAITS["megatron"].head_widths == ()
    check(folder, Case(folder).build(0))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_hidden_size_may_be_any_multiple_of_the_heads(tmp_path, family):
    """vLLM's fast norm on CPU takes multiples of 8 only."""
    folder = family_cases.make_family(tmp_path, family, 3, hidden_size=102)
    check(folder, vllm(folder))


def test_an_engine_of_other_heads_is_refused_before_it_is_built(tmp_path):
    folder = family_cases.make_family(tmp_path, "llama", 3, head_dim=16)
    with pytest.raises(InvalidInput, match=r"got 'vllm', expected another for .*: a head is 16 wide, and vllm on cpu"):
        vllm(folder)
