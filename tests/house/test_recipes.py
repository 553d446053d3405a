"""Linters accept the recipes that no test can run: the image for GPU hosts and the scripts of the docs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
TOOLS = Path(sys.executable).parent
SCRIPTS = re.compile(r"^```bash\n(#!.*?)^```", re.MULTILINE | re.DOTALL)


def lint(*command, text=None):
    """What a linter says of its standard input or of files; empty if it accepts them."""
    found = subprocess.run([TOOLS / command[0], *command[1:]], input=text, capture_output=True, text=True, timeout=60)
    return found.stdout + found.stderr


def test_a_linter_accepts_the_image_for_gpu_hosts():
    assert lint("hadolint", PROJECT / "Dockerfile") == ""
    assert "DL3006" in lint("hadolint", "-", text="FROM python\n")


@pytest.mark.parametrize("page", ["slurm.md"])
def test_a_linter_accepts_the_scripts_of_a_page(page):
    (script,) = SCRIPTS.findall((PROJECT / "docs" / page).read_text())
    assert lint("shellcheck", "-", text=script) == ""
    assert "SC2086" in lint("shellcheck", "-", text=script + "echo $HOME\n")
