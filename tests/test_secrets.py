"""A tool cannot read the worker's secrets: the attack, on the processes of a run."""

import json
import os
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from tests.support import secrets_functions, secrets_tree
from tests.support.secrets_functions import NAMES
from tests.support.tiny import make_model
from tests.tasks.data.stored import json_lines

pytestmark = pytest.mark.slow
NOBODY = (
    *("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"),
    *("--inh-caps=-all,+dac_read_search", "--ambient-caps=-all,+dac_read_search"),  # Python may stand in root's home
    "--bounding-set=-all,+dac_read_search",
)
ROOT = Path(__file__).parents[1]


@pytest.fixture(params=["this user", pytest.param("another user", marks=pytest.mark.all)])
def prefix(request):
    if request.param == "this user":
        return ()
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("only root may become another user")
    return NOBODY


@pytest.fixture
def secrets():
    """Variables with a secret that no other test has."""
    return dict.fromkeys(NAMES, f"canary-{uuid.uuid4()}")


@pytest.fixture
def shown(prefix, secrets):
    """A process with the secrets in its variables, so that a look that finds nothing is seen."""
    command = [*prefix, sys.executable, "-c", "print(flush=True); input()"]
    with subprocess.Popen(command, env=os.environ | secrets, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        yield process.pid
        process.kill()


def test_a_tool_finds_no_secret_in_the_processes_of_its_run(prefix, shown, secrets, tmp_path):
    """Not in worker, keeper, controller, server, fork server, ranks or rewards; a reward has them, a play has not.

    Ranks still read each other's memory: no weights are left for messages.
    """
    tmp_path.chmod(0o777)
    for folder in (tmp_path, *list(tmp_path.parents)[:3]):
        folder.chmod(folder.stat().st_mode | 0o011)
    variables = os.environ | secrets | {"HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    command = [*prefix, sys.executable, "-m", secrets_tree.__name__, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert seen["played"] == {"0": [[1.0], "Asks"], "1": [[1.0], "Asks"]}
    assert seen["read"] == {"0": [0, True], "1": [0, True]}
    for rank in range(2):
        assert list(json.loads((tmp_path / f"found-{rank}.json").read_text())) == [str(shown)]


@pytest.mark.all
def test_a_tool_finds_no_secret_in_a_dry_run_at_a_terminal(secrets, tmp_path):
    """Whose plays are tried in processes below it. It wipes its own variables before."""
    shared = {"prompt": "what is it", "secret": secrets[NAMES[0]]}
    rows = [shared | {"out": str(tmp_path / f"{number}.json")} for number in range(4)]
    prompts = {"path": json_lines(tmp_path / "prompts.jsonl", *rows), "split_column": None}
    play = {"function": f"{secrets_functions.__file__}:looks_for_secrets", "max_tokens": 16}
    algo = {"batch_size": 4, "samples_per_prompt": 2, "kl": {"coefficient": 0.0}}
    given = {"prompts": prompts, "held_out": prompts, "actor": {"path": make_model(tmp_path / "actor")}}
    file = tmp_path / "parameters.json"
    file.write_text(json.dumps(given | {"play": play, "algo": algo, "output_dir": str(tmp_path / "runs")}))
    command = [Path(sys.executable).with_name("prefect-rlhf"), "grpo", "--parameters", file, "--dry-run"]
    variables = os.environ | secrets | {"HOME": str(tmp_path)}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(path.read_text()) for path in tmp_path.glob("[0-9].json")]
    assert found and found == [{}] * len(found)
