"""The certificate's bytes of a trained model at 7B and 70B, against the storages of Megatron's own tensors."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.models import OPTIMIZER, SHAPES
from prefect_rlhf.placement.devices.mesh import DeviceMesh
from prefect_rlhf.placement.devices.strategy import Strategy
from prefect_rlhf.placement.models.model import ModelSpec
from prefect_rlhf.placement.plan import ModelInstance
from tests.support.by_device import instance_holdings
from tests.support.strategies import call

pytestmark = pytest.mark.slow
TOLERANCE = 1.001


@pytest.mark.parametrize(
    ("size", "degrees"),
    [
        ("7B", (2, 4, 1)),
        *(pytest.param(*each, marks=pytest.mark.all) for each in (("7B", (8, 1, 1)), ("70B", (1, 8, 2)))),
    ],
)
def test_a_large_model_keeps_the_certified_bytes(tmp_path, size, degrees):
    """The tensors have shapes and no memory. Whole models, so that nothing is scaled up from a few layers."""
    script = Path(__file__).with_name("large_shapes.py")
    command = [sys.executable, str(script), str(tmp_path), size, ",".join(map(str, degrees))]
    paths = os.pathsep.join([str(Path.cwd()), *sys.path])
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "bytes.json").read_text())
    strategy = Strategy(*degrees)
    instance = ModelInstance("actor", "megatron", DeviceMesh(0, 2, 0, strategy.num_devices // 2), strategy)
    model = ModelSpec("actor", "", "lm", SHAPES[size], optimizer=OPTIMIZER)
    trained = call("train", "train_step", "actor", {}, num_rows=8)
    held = instance_holdings(instance, (trained,), model, 4096, "cuda")
    first = {kept.what: kept.num_bytes for kept in held if kept.device == held[0].device}
    assert found["trained"] <= sum(first.values()) <= TOLERANCE * found["trained"]
    assert first["weights"] + first["gradients"] < found["built"] < found["trained"]
