"""An Adam that Megatron prefers to torch's changes nothing: only torch's divides by tokens and clips."""

import json
import subprocess
import sys
from pathlib import Path

import megatron_cases as cases
import pytest
import torch
from megatron_cases import OPTIMIZER, Case

from prefect_rlhf.engines.megatron.training import optimizer
from prefect_rlhf.errors.errors import EngineFailed

pytestmark = pytest.mark.slow

SETTINGS = cases.Walk("logprobs", mini_batches=2)
WITH_ANOTHER_ADAM = """
import json, sys, types
import torch

class FusedAdam(torch.optim.Adam):
    def __init__(self, params, adam_w_mode=True, **options):
        super().__init__(params, **options)

stub = sys.modules[sys.argv[1]] = types.ModuleType(sys.argv[1])
stub.FusedAdam = stub.FusedSGD = FusedAdam
sys.path.insert(0, sys.argv[2])

from megatron.core import optimizer
assert optimizer.Adam is FusedAdam, "Megatron takes it"
from tests.engines.megatron.test_torch_adam import trained
print(json.dumps(trained(sys.argv[3])))
"""


def trained(folder):
    """Loss, gradient norm and a sum over the weights after two optimizer steps that divide by tokens and clip."""
    torch.set_num_threads(1)
    metrics, weights = cases.train(0, Case(folder, optimizer=OPTIMIZER), SETTINGS)
    return {**metrics, "weights": float(sum(abs(values).sum() for _, values in weights.values()))}


@pytest.mark.all
@pytest.mark.parametrize("module", ["transformer_engine.pytorch.optimizers", "apex.optimizers"])
def test_where_another_adam_can_be_imported_training_is_the_same(tmp_path, module):
    folder = cases.make_folder(tmp_path / "model", layers=1)
    expected = trained(folder)
    assert expected["grad_norm"] > OPTIMIZER.max_grad_norm, "clipping has something to do"
    command = [sys.executable, "-c", WITH_ANOTHER_ADAM, module, str(Path(__file__).parents[1]), folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[3])
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == expected


def test_a_foreign_optimizer_is_refused_in_one_line(tmp_path, monkeypatch):
    """A Megatron that chooses in another way than today's is not trained with."""

    class Other(torch.optim.AdamW):
        pass

    folder, make = cases.make_folder(tmp_path / "model", layers=1), optimizer.get_megatron_optimizer

    def of_another_class(*arguments, **options):
        chain = make(*arguments, **options)
        chain.chained_optimizers[0].optimizer.__class__ = Other
        return chain

    monkeypatch.setattr(optimizer, "get_megatron_optimizer", of_another_class)
    with pytest.raises(EngineFailed, match=r"^Megatron took .*Other: only torch's AdamW scales and clips$"):
        Case(folder, optimizer=OPTIMIZER).build(0)
