"""What a layer keeps for its backward on CUDA, against the certificate's formula: its CUDA kernels, run on the CPU."""

import megatron_cases as cases
import pytest
import torch
from family_cases import make_family
from megatron_cases import OPTIMIZER, Case

from prefect_rlhf.engines.engine import Sequences
from prefect_rlhf.engines.megatron import fused, layers
from prefect_rlhf.engines.megatron.cpu import kernels as cpu_kernels
from prefect_rlhf.placement.cost.call_bytes import call_bytes
from prefect_rlhf.placement.cost.execution import Execution
from prefect_rlhf.placement.cost.sizes import ModelSizes
from prefect_rlhf.placement.cost.workload import CallWork, Workload
from prefect_rlhf.placement.devices.strategy import Strategy
from prefect_rlhf.placement.models import engine_constants

ROWS, LENGTH = 3, 64
SHALLOW, DEEP = 2, 3


@pytest.fixture(autouse=True)
def cuda_kernels(monkeypatch):
    """Layers take the kernels of CUDA. Its norm is one kernel that keeps its input and a number a token, as ours does
    here, where torch would compose it."""
    monkeypatch.setattr(fused, "rms_norm", cpu_kernels.rms_norm)
    monkeypatch.setattr(layers, "kernels", lambda _: fused)


def saved_bytes(case: Case, lengths: list[int]) -> int:
    """Bytes of all storages that a train_step keeps for its backward, weights left out."""
    engine, longest = case.build(0), max(lengths)
    tokens = torch.randint(1, cases.VOCAB, (len(lengths), longest))
    sequences = Sequences(tokens, torch.full((len(lengths),), longest // 2), torch.tensor(lengths))
    mask = sequences.response_mask_BT()
    weights = {parameter.untyped_storage().data_ptr() for parameter in engine._model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(saved: torch.Tensor) -> torch.Tensor:
        kept.setdefault(saved.untyped_storage().data_ptr(), saved)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        cases.train_on(engine, sequences, {"mask": mask, "advantages": mask * 1.0}, cases.loss, cases.Walk("logprobs"))
    return sum(saved.untyped_storage().nbytes() for start, saved in kept.items() if start not in weights)


def counted_bytes(case: Case) -> int:
    """What the certificate counts for rows of the full length."""
    work = CallWork("train_step", ROWS, Workload.fixed(LENGTH // 2, LENGTH // 2))
    return call_bytes(work, Execution(Strategy()), ModelSizes.of(case.spec()), stage=0).activations


@pytest.mark.parametrize(("kv_heads", "family"), [(2, "llama"), (4, "llama"), (2, "qwen3")])
def test_a_layer_on_cuda_keeps_the_counted_bytes(tmp_path, kv_heads, family):
    """Per layer, as the difference of two depths: 4 hidden + 5 queries + 3 keys + 4 inner numbers a token (4 queries
    where none share a key), and statistics; queries and keys once more where they have norms. Rows as nearly equal as
    rows that must be packed can be."""
    counted, kept = [], []
    for depth in (SHALLOW, DEEP):
        if family == "llama":
            folder = cases.make_folder(tmp_path / str(depth), layers=depth, hidden=192, kv_heads=kv_heads)
        else:
            folder = make_family(tmp_path / str(depth), family, kv_heads, num_hidden_layers=depth)
        case = Case(folder, dtype="bfloat16", optimizer=OPTIMIZER)
        counted.append(counted_bytes(case))
        kept.append(saved_bytes(case, [LENGTH] * (ROWS - 1) + [LENGTH - 1]))
    of_layer = kept[1] - kept[0]
    assert of_layer <= counted[1] - counted[0] <= 1.01 * of_layer


def test_a_layer_with_a_window_keeps_no_more(tmp_path, monkeypatch):
    """Rows of several blocks: what the kernel keeps of each block is a part of what it keeps of a row."""
    counted, kept = [], []
    monkeypatch.setattr(fused, "attention", fused.window_attention)
    monkeypatch.setattr(engine_constants, "LEAST_WINDOW_BLOCK", LENGTH // 4)
    fused._window_mask.cache_clear()  # of masks of longer blocks
    for depth in (SHALLOW, DEEP):
        local = {"layer_types": ["sliding_attention"] * depth, "sliding_window": LENGTH // 4}
        folder = make_family(tmp_path / str(depth), "gemma3_text", 2, num_hidden_layers=depth, **local)
        case = Case(folder, dtype="bfloat16", optimizer=OPTIMIZER)
        counted.append(counted_bytes(case))
        kept.append(saved_bytes(case, [LENGTH] * (ROWS - 1) + [LENGTH - 1]))
    of_layer = kept[1] - kept[0]
    fused._window_mask.cache_clear()
    assert of_layer <= counted[1] - counted[0] <= 1.03 * of_layer
