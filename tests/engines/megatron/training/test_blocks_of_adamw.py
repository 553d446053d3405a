"""AdamW in blocks on CPU has the bits of torch's fused AdamW and Megatron's copy after it."""

import megatron_cases as cases
import pytest
import torch
from megatron_cases import OPTIMIZER, Case

from prefect_rlhf.engines.megatron.cpu import adamw

pytestmark = pytest.mark.slow


def as_megatron_does(part, clip):
    """The step of the library: AdamW divides the gradients, and the main weights are copied afterwards."""
    part.optimizer.grad_scale = torch.tensor(1 / clip)
    part.step_with_ready_grads()


def trained(case):
    """Weights and training state after three optimizer steps."""
    engine = case.build(0)
    sequences, batch = cases.make_rows(24)
    walk = cases.Walk("logprobs", mini_batches=3)
    metrics = cases.train_on(engine, sequences, batch, cases.loss, walk)
    state = [(part.kind, part.parameter, part.region, part.values.tolist()) for part in engine.state_parts()]
    return metrics, {name: values.tolist() for name, (_, values) in cases.held(engine).items()}, state


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("is_clipped", [True, False])
def test_blocks_have_the_bits_of_a_whole_step(tmp_path, monkeypatch, dtype, is_clipped):
    torch.set_num_threads(1)
    folder = cases.make_folder(tmp_path / "model", layers=1)
    case = Case(folder, dtype=dtype, optimizer=OPTIMIZER).with_optimizer(max_grad_norm=0.1 if is_clipped else 1e9)
    monkeypatch.setattr(adamw, "BLOCK", 1 << 10)  # most weights have several blocks, and a last one that is shorter
    in_blocks = trained(case)
    monkeypatch.setattr(adamw, "step", as_megatron_does)
    assert in_blocks == trained(case)
    assert in_blocks[0]["grad_norm"] > 0.1, "clipping has something to do"
