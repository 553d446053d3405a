"""The imports of ranks are tried in a process of its own, and the first that fails is named."""

import pytest

from prefect_rlhf.engines.gang.processes.trial_imports import try_imports
from prefect_rlhf.errors.errors import EngineFailed


def test_modules_that_can_be_imported_cost_no_word():
    try_imports(["json", "csv"], {})


def test_the_first_module_that_fails_is_named_with_its_error_on_one_line(tmp_path):
    (tmp_path / "broken.py").write_text('print("noise")\nimport json, no_such_library\n')
    (tmp_path / "loud.py").write_text('raise RuntimeError("two\\nlines")\n')
    found = {"PYTHONPATH": str(tmp_path)}
    with pytest.raises(EngineFailed, match="^broken: ModuleNotFoundError: No module named 'no_such_library'$"):
        try_imports(["csv", "broken", "loud"], found)
    with pytest.raises(EngineFailed, match="^loud: RuntimeError: two lines$"):
        try_imports(["loud"], found)


def test_a_module_that_ends_the_process_or_hangs_is_an_error(tmp_path):
    (tmp_path / "dead.py").write_text("import os\nos._exit(3)\n")
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(60)\n")
    found = {"PYTHONPATH": str(tmp_path)}
    with pytest.raises(EngineFailed, match="the imports ended with 3"):
        try_imports(["dead"], found)
    with pytest.raises(EngineFailed, match="took more than 2 s"):
        try_imports(["slow"], found, limit_seconds=2)
