"""Variables of a process that others cannot read: `/proc/PID/environ` has the harmless alone, the process has all."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from prefect_rlhf.files.processes import environment
from prefect_rlhf.files.processes.environment import handed_over, is_shown, starts_module

LOOK = "open('/proc/self/environ').read().split(chr(0))"
HIDE = f"""
import json, os, subprocess
os.environ["LATE_TOKEN"] = "later"
from prefect_rlhf.files.processes.environment import hide
hide()
hide()
variables = [name.partition("=")[0] for name in {LOOK} if name]
below = subprocess.run(["printenv", "HF_TOKEN", "LATE_TOKEN"], capture_output=True, text=True).stdout.split()
print(json.dumps([variables, os.environ["HF_TOKEN"], below]))
"""


def test_a_process_wipes_its_variables_and_keeps_them():
    """Also for the programs that it starts, as often as it is asked."""
    given = os.environ | {"HF_TOKEN": "canary", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", HIDE], env=given, capture_output=True, text=True, check=True, timeout=60
    )
    variables, own, below = json.loads(done.stdout)
    assert sorted(variables) == sorted(filter(is_shown, given))
    assert (own, below) == ("canary", ["canary", "later"])


@pytest.mark.parametrize("flags", [(), ("-P",), ("-u", "-X", "faulthandler")])
def test_a_module_gets_all_variables_and_starts_with_the_harmless(flags, tmp_path):
    """It is the main module with its own arguments, and finds modules as after `python -m`."""
    (tmp_path / "told.py").write_text(
        f"import os, sys\nprint(__name__, sys.argv[1:], os.environ['TOKEN'] == 'a\\udc80\\n' * 90_000)\n"
        f"print('TOKEN' in ''.join({LOOK}), sys.path[0] == os.getcwd(), sys.modules['__main__'].__file__)\n"
    )
    variables = {
        "TOKEN": "a\udc80\n" * 90_000,
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.pathsep.join(["/", str(tmp_path)]),  # for -P, which leaves the working folder out
    }
    with handed_over([sys.executable, *flags, "-m", "told", "-m", "x"], variables) as (command, shown, descriptor):
        done = subprocess.run(
            command,
            env=shown,
            pass_fds=(descriptor,),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
    in_folder = "-P" not in flags
    assert done.stdout.splitlines() == [
        "__main__ ['-m', 'x'] True",
        f"False {in_folder} {tmp_path / 'told.py'}",
    ]


def test_only_modules_of_this_interpreter_read_their_variables_themselves():
    assert starts_module([sys.executable, "-u", "-m", "told"])
    assert starts_module([sys.executable, "-X", "faulthandler", "-m", "told", "-c"])
    assert not starts_module([sys.executable, "told.py", "-m", "x"])
    assert not starts_module([sys.executable, "-c", "-m", "-m", "x"])
    for command in ([sys.executable, "told.py"], ["bash", "-m", "told"], [sys.executable, "-m"], [sys.executable]):
        assert not starts_module(command)


def test_no_file_next_to_the_script_hides_a_python_module():
    """It starts in this folder, so its imports would find such a file."""
    beside = {path.stem for path in Path(environment.__file__).parent.glob("*")}
    assert beside & sys.stdlib_module_names == set()
