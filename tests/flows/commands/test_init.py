"""`prefect-rlhf init FOLDER`: what it writes can be drawn, dry-run, deployed and trained as it is, given a model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from prefect.flows import load_flow_from_entrypoint
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools import validate

from prefect_rlhf.flows.commands.cli import main
from tests.blocks.prefect_site import PrefectSite, everything_up
from tests.tiny import make_model

PROJECT = Path(__file__).parents[3]
FILES = ["my_reinforce.py", "parameters.yaml", "prefect.yaml", "prompts.jsonl"]
DEPLOYMENTS = [
    deployment["name"] for deployment in yaml.safe_load((PROJECT / "prefect.yaml").read_text())["deployments"]
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What the command wrote, and the model that its parameters name."""
    folder = tmp_path_factory.mktemp("user") / "deep" / "first"
    assert main(["init", str(folder)]) == 0
    assert sorted(path.name for path in folder.iterdir()) == FILES
    make_model(folder / "models" / "smollm2")
    return folder


@pytest.mark.parametrize("name", [*DEPLOYMENTS, "my-reinforce"])
def test_every_deployment_is_there_with_parameters_that_its_flow_takes(folder, monkeypatch, name):
    """By the schema that Prefect enforces and by the flow itself; everything they name lies in the folder."""
    monkeypatch.chdir(folder)
    text = Path("prefect.yaml").read_text()
    assert "$" not in text
    (deployment,) = [one for one in yaml.safe_load(text)["deployments"] if one["name"] == name]
    assert deployment["work_pool"]["name"] == "two-device-mesh"
    flow = load_flow_from_entrypoint(deployment["entrypoint"])
    validate(deployment["parameters"], parameter_schema(flow).model_dump(), raise_on_error=True)
    assert flow.validate_parameters(deployment["parameters"]).keys() >= deployment["parameters"].keys()


@pytest.mark.all  # tests/test_docs.py runs these commands of the README
def test_its_flow_dry_runs_on_its_parameters(folder):
    """In a process of its own: a page of the docs shows the same algorithm, and a process may define one once."""
    words = ["run", "my_reinforce.py:reinforce", "--parameters", "parameters.yaml", "--devices", "2", "--dry-run"]
    command = [str(Path(sys.executable).with_name("prefect-rlhf")), *words]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert "10 steps would run" in ended.stdout


def test_nothing_is_overwritten(tmp_path, capsys):
    """One file that is there already is enough, and then no other is written."""
    (tmp_path / "parameters.yaml").write_text("mine: 1\n")
    assert main(["init", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "without parameters.yaml: no file is overwritten" in line
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine: 1\n"]


@pytest.mark.parametrize(
    ("name", "says"), [("a{b", "expected a path without"), ('a"b', "expected a path without"), ("file/x", "cannot be")]
)
def test_a_folder_that_cannot_be_costs_a_line(tmp_path, capsys, name, says):
    (tmp_path / "file").write_text("")
    assert main(["init", str(tmp_path / name)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


class InitSite(PrefectSite):
    """A site whose deployments are those of the command."""

    def deploy(self) -> None:
        """Do what the command says is next."""
        home = self.folder / "first"
        assert main(["init", str(home)]) == 0
        make_model(home / "models" / "smollm2")
        self.prefect("work-pool", "create", "two-device-mesh", "--type", "gpu-mesh")
        self.prefect("deploy", "--all", cwd=home)

    def start_worker(self) -> None:
        """Start one for the pool that prefect.yaml names."""
        self._start("worker", "worker", "start", "--pool", "two-device-mesh", "--name", "tester")
        self.until(lambda: b"started!" in (self.folder / "worker.log").read_bytes(), 60)


@pytest.mark.slow
@pytest.mark.all
def test_all_is_deployed_and_the_flow_trains(tmp_path):
    """By a worker that was started elsewhere."""
    with everything_up(InitSite(tmp_path)) as site:
        deployed = {found["name"] for found in site.ask("/deployments/filter", {})}
        assert deployed == {*DEPLOYMENTS, "my-reinforce"}
        run = site.run("my-reinforce", {"lease_directory": str(tmp_path / "leases")}, steps=2)
        site.until_state(run, "COMPLETED", 300)
        folder = tmp_path / "first" / "runs" / str(site.ask(f"/flow_runs/{run}")["name"])
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert ["score.answer_alone" in step for step in steps] == [True, True]
    assert (folder / "actor" / "model.safetensors").is_file()
