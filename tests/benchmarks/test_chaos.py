"""A few moments of `benchmarks/chaos.py`: harmed runs end by themselves, as if nothing had been."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts the disk to be filled")]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("moments", "victims"),
    [
        pytest.param(3, "rank,suspend,server", id="three"),
        pytest.param(12, None, id="dozen", marks=pytest.mark.all),
    ],
)
def test_harmed_runs_end_by_themselves_with_the_weights_of_an_undisturbed_one(moments, victims):
    words = ["--moments", str(moments), "--steps", "3", *(["--victims", victims] if victims else [])]
    line = [sys.executable, "-m", "benchmarks.chaos", *words]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=3500, check=False)
    last = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert last["moments"] == last["recovered"] == last["identical"] == moments and last["orphans"] == 0
