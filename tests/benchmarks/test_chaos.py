"""Moments of `benchmarks/faults/chaos.py`: harmed runs end by themselves, as if nothing had been."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ray_nodes import why_not

ROOT = Path(__file__).resolve().parents[2]
OVER_NODES = pytest.mark.skipif(bool(why_not()), reason=why_not())

pytestmark = [
    pytest.mark.slow,
    pytest.mark.all,  # tests/flows/test_resume.py kills a rank
    pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts the disk to be filled"),
]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("moments", "words"),
    [
        pytest.param(11, [], id="all of one machine"),
        pytest.param(15, ["--gang", "ray"], id="all of several", marks=OVER_NODES),
    ],
)
def test_harmed_runs_finish_with_the_same_weights_as_an_undisturbed_run(moments, words):
    words = ["--moments", str(moments), "--steps", "3", *words]
    line = [sys.executable, "-m", "benchmarks.faults.chaos", *words]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=3500, check=False)
    last = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert last["moments"] == last["recovered"] == last["identical"] == moments and last["orphans"] == 0
