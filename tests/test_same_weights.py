"""Runs of this tree and of an earlier commit, on the same machine, end with the same weights, bit for bit."""

import io
import json
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from prefect_rlhf.engines.cpu_products import has_bfloat16
from tests.support.runs import environment
from tests.support.tiny import ppo_parameters

pytestmark = [
    pytest.mark.slow,
    pytest.mark.all,
    pytest.mark.usefixtures("prefect"),
    pytest.mark.skipif(not has_bfloat16(), reason="this CPU rounds products of bfloat16 otherwise than the commit did"),
]

BASE = "abc35c1"
"""The commit whose weights this tree must have.

A CPU that multiplies float32 faster than bfloat16 rounds products of many tokens otherwise than this commit did
(`engines/cpu_products.py`). Passes of these runs have 64 tokens at most, too few for that if oneDNN has bfloat16 there.
"""
ROOT = Path(__file__).parents[1]
STEPS = 2
PROGRAM = """
import json, sys
import prefect_rlhf
result = prefect_rlhf.run(sys.argv[1], devices=1, **json.loads(sys.argv[2]))
print(json.dumps([prefect_rlhf.__file__, str(result.run_dir)]))
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The files of the earlier commit."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a git checkout")
    packed = subprocess.run(["git", "archive", BASE], cwd=ROOT, capture_output=True, timeout=60, check=False)
    if packed.returncode:
        pytest.skip(f"the history lacks {BASE}: {packed.stderr.decode().strip()}")
    folder = tmp_path_factory.mktemp("base")
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        archive.extractall(folder, filter="tar")  # its symbolic links lead to folders of the archive
    return folder


def run(tree, algorithm, parameters, output):
    """The folder of a run with the code of `tree`."""
    given = json.dumps(parameters | {"output_dir": str(output)})
    line = [sys.executable, "-c", PROGRAM, algorithm, given]
    code = environment(PYTHONPATH=str(tree / "src"))
    done = subprocess.run(line, cwd=output.parent, env=code, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    place, run_dir = json.loads(done.stdout.splitlines()[-1])
    assert Path(place).is_relative_to(tree), place
    return Path(run_dir)


def assert_same_weights(run_dir, expected_dir, role):
    weights, expected = (load_file(folder / role / "model.safetensors") for folder in (run_dir, expected_dir))
    assert weights.keys() == expected.keys()
    assert [name for name, values in expected.items() if not torch.equal(weights[name], values)] == []


@pytest.mark.parametrize(("algorithm", "roles"), [("ppo", ["actor", "critic"]), ("grpo", ["actor"])])
def test_weights_are_those_of_the_base_commit_also_after_a_resume_of_its_checkpoint(tmp_path, base, algorithm, roles):
    parameters = ppo_parameters(tmp_path) | {"steps": STEPS, "checkpoint_every": 1}
    if algorithm == "grpo":
        del parameters["critic"]
    before = run(base, algorithm, parameters, tmp_path / "before")
    after = run(ROOT, algorithm, parameters, tmp_path / "after")
    checkpoint = str(before / "checkpoints" / "step-000001")
    resumed = run(ROOT, algorithm, parameters | {"resume_from": checkpoint}, tmp_path / "resumed")
    for role in roles:
        untrained = load_file(tmp_path / ("reward" if role == "critic" else role) / "model.safetensors")
        trained = load_file(before / role / "model.safetensors")
        assert any(not torch.equal(trained[name], untrained[name]) for name in trained.keys() & untrained.keys())
        assert_same_weights(after, before, role)
        assert_same_weights(resumed, before, role)
