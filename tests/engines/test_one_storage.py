"""What two engines would need to hold a frozen base once: see docs/adr/0066."""

import pytest
import torch
from family_cases import OPTIONS, make_family
from megatron_cases import Case

from prefect_rlhf.engines.commands import BuildCommand
from prefect_rlhf.engines.engine import SamplingSettings
from prefect_rlhf.engines.megatron import weights
from prefect_rlhf.engines.process_groups import ensure_world
from prefect_rlhf.engines.vllm.engine import VllmEngine
from prefect_rlhf.placement.devices.mesh import DeviceMesh
from prefect_rlhf.placement.devices.strategy import Strategy
from prefect_rlhf.placement.plan import ModelInstance
from tests.layouts import vllm_layout

QKV = {"self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias"}
PROMPTS = [[5, 6, 7, 8, 9], [10, 11, 12]]
GREEDY = SamplingSettings(max_new_tokens=12, temperature=0.0, stop_at_eos=False)


def build_vllm(case):
    ensure_world()
    instance = ModelInstance("actor", "vllm", DeviceMesh(0, 1, 0, 1), Strategy())
    layout = vllm_layout(case.spec(), instance.strategy, (0,))
    return VllmEngine(BuildCommand(case.spec(), instance, (0,), layout, 64, max_rows=8), 0)


def borrowed(trainer, lender):
    """Let a Megatron engine compute from vLLM's tensors, where their bytes are equal; return the others' names."""
    held, left = weights.by_storage(trainer.weights()), []
    theirs = lender.weights()
    for name, own in trainer._model.named_parameters():
        parts = [theirs[part].view for part in held[own.untyped_storage()._cdata]]
        first = min(parts, key=lambda part: part.storage_offset())
        fits = first.storage_offset() + own.numel() <= first.untyped_storage().nbytes() // first.element_size()
        same = first.as_strided(own.shape, own.stride(), first.storage_offset()) if fits else first
        if fits and torch.equal(same, own):
            own.data = same
        else:
            left.append(name)
    return left


@pytest.mark.all
@pytest.mark.parametrize("family", OPTIONS)
def test_all_but_queries_keys_and_values_could_be_one_storage(tmp_path, family):
    """Both engines then still make the bits that each made alone."""
    folder = make_family(tmp_path, family, kv_heads=2)
    case = Case(folder)
    lender, trainer = build_vllm(case), case.build(0)
    alone = [engine.generate(PROMPTS, GREEDY, [1, 2]) for engine in (lender, trainer)]
    left = borrowed(trainer, lender)
    assert {name.split(".", 3)[-1] for name in left} <= QKV
    assert [engine.generate(PROMPTS, GREEDY, [1, 2]) for engine in (lender, trainer)] == alone
