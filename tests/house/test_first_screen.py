"""The commands of docs/install.md, word for word, in an empty environment: from a clone to a trained model."""

import os
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
import torch
from safetensors.torch import load_file

PROJECT = Path(__file__).parents[2]
INSTALL = (PROJECT / "docs" / "install.md").read_text()
INDEX = re.compile(r" --index-url (\S+)")
NAMES = ("PYTHONPATH", "VIRTUAL_ENV", "RLHF_LEASE", "RLHF_HOME", "PREFECT_API_URL", "CUDA_VISIBLE_DEVICES")


def first_screen():
    """The commands of the page's first console block."""
    block = re.findall(r"^```console\n(.*?)^```", INSTALL, re.MULTILINE | re.DOTALL)[0]
    return [line.removeprefix("$ ").partition("  #")[0].rstrip() for line in block.splitlines()]


def reachable(commands):
    """The commands as they are, or from pip's configured index if theirs gives no answer; a warning says so."""
    (url,) = {url for command in commands for url in INDEX.findall(command)}
    try:
        urlopen(f"{url}/torch/", timeout=30).close()
    except (URLError, TimeoutError) as error:
        warnings.warn(f"{url} is not reached ({error}): torch is from pip's configured index", stacklevel=2)
        return [INDEX.sub("", command) for command in commands]
    return commands


def test_the_first_screen_states_the_projects_versions():
    """Python 3.11 and torch from the CPU index stand in the commands, and the commands for GPUs below them."""
    commands = first_screen()
    assert commands[0].startswith("python3.11 -m venv ")
    assert f"PYTHON ?= {commands[0].split()[0]}\n" in (PROJECT / "Makefile").read_text()
    (pin,) = re.findall(r'^cpu = \["(torch==[^"]*)"', (PROJECT / "pyproject.toml").read_text(), re.MULTILINE)
    assert commands[2] == f"pip install {pin} --index-url https://download.pytorch.org/whl/cpu"
    assert f"pip install --quiet {pin}\n" in (PROJECT / "Makefile").read_text()
    assert commands[3] == "pip install --no-deps -r constraints.txt ."
    assert "`pip install --no-deps -r constraints-cuda.txt .`" in INSTALL


@pytest.mark.slow
@pytest.mark.all
@pytest.mark.timeout(3600)
def test_the_first_screen_trains_a_model_in_an_empty_environment(tmp_path):
    """In a copy of the tree, with nothing on PATH of the environment that runs the tests."""
    left_out = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info", "runs", "first")
    shutil.copytree(PROJECT, tmp_path / "clone", symlinks=True, ignore=left_out)
    own = {str(Path(sys.executable).parent), str(Path(sys.prefix) / "bin")}
    path = os.pathsep.join(part for part in os.environ["PATH"].split(os.pathsep) if part not in own)
    environment = {name: value for name, value in os.environ.items() if name not in NAMES}
    environment |= {"PATH": path, "PREFECT_HOME": str(tmp_path / "prefect")}
    script = "\n".join(["set -e", *reachable(first_screen())])
    words = {"cwd": tmp_path / "clone", "env": environment, "capture_output": True, "text": True}
    ended = subprocess.run(["bash", "-c", script], **words, timeout=3500, check=False)
    shutil.rmtree(tmp_path / "clone" / ".venv")  # 4 GB, which pytest would keep
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-5000:]
    first = tmp_path / "clone" / "first"
    before = load_file(first / "models" / "smollm2" / "model.safetensors")
    after = load_file(first / "runs" / "latest" / "actor" / "model.safetensors")
    shared = before.keys() & after.keys()
    assert any(not torch.equal(before[name].to(after[name].dtype), after[name]) for name in shared)
