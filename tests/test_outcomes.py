"""Outcomes of tests on a GPU are kept as they come."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).parents[1]
TESTS = """
import os, pytest
def test_fails():
    assert 1 == 2
@pytest.mark.skip(reason="no")
def test_is_skipped(): ...
def test_passes(): ...
def test_ends_the_session():
    os._exit(9)
"""


def test_a_session_that_is_cut_leaves_the_names_and_reasons_of_its_tests(tmp_path):
    (tmp_path / "test_some.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "tests.outcomes", "-p", "no:cacheprovider", str(tmp_path)]
    environment = os.environ | {"RLHF_OUTCOMES": str(tmp_path / "kept.jsonl"), "PYTHONPATH": str(PROJECT)}
    environment.pop("PYTEST_XDIST_WORKER", None)
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 9 and "test_fails: assert 1 == 2" in ended.stderr
    kept = [json.loads(line) for line in (tmp_path / "kept.jsonl").read_text().splitlines()]
    assert [each["outcome"] for each in kept] == ["failed", "skipped", "passed"]
    assert kept[0]["test"].endswith("test_some.py::test_fails") and kept[0]["reason"].startswith("assert 1 == 2")
    assert kept[0]["place"].endswith("test_some.py:4")


def test_the_tests_on_a_gpu_keep_them():
    """`make test-gpu` also shows each test as it runs, names failures at the end, and writes a file for CI."""
    (recipe,) = re.findall(r"^test-gpu:\n(.*?)\n\n", (PROJECT / "Makefile").read_text(), re.MULTILINE | re.DOTALL)
    for option in ("-v", "-rf", "--tb=short", "--junitxml=build/gpu-tests.xml", "-p tests.outcomes", "RLHF_OUTCOMES="):
        assert option in recipe, option
