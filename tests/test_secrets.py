"""A tool cannot read the worker's secrets: the attack, on the processes of a run."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import secrets_tree
from tests.secrets_tree import CANARY, NAMES

pytestmark = pytest.mark.slow
NOBODY = (
    *("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"),
    *("--inh-caps=-all,+dac_read_search", "--ambient-caps=-all,+dac_read_search"),  # Python may stand in root's home
    "--bounding-set=-all,+dac_read_search",
)
ROOT = Path(__file__).parents[1]


@pytest.fixture(params=["this user", "another user"])
def prefix(request):
    if request.param == "this user":
        return ()
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("only root may become another user")
    return NOBODY


@pytest.fixture
def shown(prefix):
    """A process with the secrets in its variables, so that a look that finds nothing is seen."""
    command = [*prefix, sys.executable, "-c", "print(flush=True); input()"]
    secrets = os.environ | dict.fromkeys(NAMES, CANARY)
    with subprocess.Popen(command, env=secrets, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        yield process.pid
        process.kill()


def test_a_tool_finds_no_secret_in_the_processes_of_its_run(prefix, shown, tmp_path):
    """Not in worker, keeper, controller, server, fork server, ranks or rewards; a reward has them, a play has not.

    Ranks still read each other's memory: no weights are left for messages.
    """
    tmp_path.chmod(0o777)
    for folder in (tmp_path, *list(tmp_path.parents)[:3]):
        folder.chmod(folder.stat().st_mode | 0o011)
    secrets = os.environ | dict.fromkeys(NAMES, CANARY) | {"HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    command = [*prefix, sys.executable, "-m", secrets_tree.__name__, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=secrets, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert seen["played"] == {"0": [[1.0], "Asks"], "1": [[1.0], "Asks"]}
    assert seen["read"] == {"0": [0, True], "1": [0, True]}
    for rank in range(2):
        assert list(json.loads((tmp_path / f"found-{rank}.json").read_text())) == [str(shown)]
