"""The flight recorder is set up by names that this version of torch does not call deprecated."""

import os
import subprocess
import sys

from prefect_rlhf.engines.gang.processes.flight_recorder import environment

JOIN = """
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.barrier()
"""


def said_with(variables):
    done = subprocess.run([sys.executable, "-c", JOIN], env=os.environ | variables, capture_output=True, text=True)
    assert done.returncode == 0
    return [line for line in done.stderr.splitlines() if "deprecated" in line]


def test_torch_calls_no_variable_of_the_recorder_deprecated(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCH_NCCL_TRACE_BUFFER_SIZE", raising=False)
    assert said_with(dict(environment(tmp_path))) == []
    assert said_with({"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000"}), "torch warns of the old name, so the test can fail"


def test_user_settings_stay_also_under_the_old_name(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", "70")
    assert environment(tmp_path)["TORCH_FR_BUFFER_SIZE"] == "70"
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "80")
    assert environment(tmp_path)["TORCH_FR_BUFFER_SIZE"] == "80"
