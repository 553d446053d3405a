"""`prefect-rlhf init FOLDER`: what it writes can be drawn, dry-run, deployed and trained as it is, given a model."""

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from prefect.cli._app import _app as prefect_cli
from prefect.flows import load_flow_from_entrypoint
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools import validate

from prefect_rlhf.blocks.worker.worker import GpuMeshWorker
from prefect_rlhf.flows.commands.cli import main
from tests.blocks.prefect_site import PrefectSite, everything_up
from tests.flows.hardware.test_gpus import CUDA_BUILDS, builds, driver, row  # noqa: F401  fixtures
from tests.support.runs import read_lines
from tests.support.tiny import make_model

PROJECT = Path(__file__).parents[3]
FILES = ["my_reinforce.py", "parameters.yaml", "prefect.yaml", "prompts.jsonl", "tools.jinja"]
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
def test_every_deployment_exists_with_parameters_that_its_flow_accepts(folder, monkeypatch, name):
    """By the schema that Prefect enforces and by the flow itself; everything they name lies in the folder."""
    monkeypatch.chdir(folder)
    text = Path("prefect.yaml").read_text()
    assert "$" not in text
    (deployment,) = [one for one in yaml.safe_load(text)["deployments"] if one["name"] == name]
    assert deployment["work_pool"]["name"] == "two-device-mesh"
    flow = load_flow_from_entrypoint(deployment["entrypoint"])
    validate(deployment["parameters"], parameter_schema(flow).model_dump(), raise_on_error=True)
    assert flow.validate_parameters(deployment["parameters"]).keys() >= deployment["parameters"].keys()


@pytest.mark.parametrize(("kind", "chosen"), [("cpu", "rollout"), ("cuda", "recompute")])
def test_every_deployment_takes_kind_and_logprobs_from_the_definitions(tmp_path, driver, builds, kind, chosen):  # noqa: F811
    """On GPUs the two engines round differently, so each algorithm that can recomputes its old log-probabilities."""
    driver(*map(row, range(3)))
    builds(CUDA_BUILDS if kind == "cuda" else {"torch": "2.13.0+cpu"})
    assert main(["init", str(tmp_path)]) == 0
    for deployment in yaml.safe_load((tmp_path / "prefect.yaml").read_text())["deployments"]:
        cluster = GpuMeshWorker.job_configuration(**deployment["work_pool"]["job_variables"])
        assert (cluster.kind, cluster.shape.backend) == (kind, kind)
        assert cluster.wanted == ("n0:0-2" if kind == "cuda" else "n0:0-1") == cluster.shape.whole.name
        assert 78 < cluster.device_memory_gib < 79.1 if kind == "cuda" else cluster.device_memory_gib == 8
        if deployment["name"] != "my-reinforce":  # its settings have no such option
            schema = parameter_schema(load_flow_from_entrypoint(deployment["entrypoint"])).model_dump()
            given = deployment["parameters"].get("algo", {}).get("old_logprobs")
            assert given == (chosen if "old_logprobs" in json.dumps(schema) else None)


def test_a_kind_that_this_machine_lacks_costs_a_line_and_writes_nothing(tmp_path, builds, capsys):  # noqa: F811
    builds({"torch": "2.13.0+cpu"})
    assert main(["init", str(tmp_path), "--kind", "cuda"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "kind: got 'cuda', expected cpu" in line and list(tmp_path.iterdir()) == []


@pytest.mark.all  # tests/house/test_docs.py runs these commands of the README
def test_its_flow_dry_runs_on_its_parameters(folder):
    """In a process of its own: a page of the docs shows the same algorithm, and a process may define one once."""
    words = ["run", "my_reinforce.py:reinforce", "--parameters", "parameters.yaml", "--devices", "2", "--dry-run"]
    command = [str(Path(sys.executable).with_name("prefect-rlhf")), *words]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert "10 steps would run" in ended.stdout


def test_init_overwrites_no_file(tmp_path, capsys):
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


def terminals(text):
    """The commands of each terminal: paragraphs that are indented."""
    paragraphs = text.split("\n\n")
    return [[line.strip() for line in each.splitlines()] for each in paragraphs if each.startswith("  ")]


def printed(folder):
    """What the command prints in an empty folder."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert main(["init", str(folder)]) == 0
    return said.getvalue()


def test_its_prefect_commands_match_the_page_and_work(tmp_path):
    """The page on authoring has the same terminals; each command, its flags and the type of the pool exist."""
    _, *shown = terminals(printed(tmp_path))
    ours = [command for commands in shown for command in commands if not command.startswith("cd ")]
    page = (PROJECT / "docs" / "authoring.md").read_text().partition("First start the server:")[2]
    assert ours == re.findall(r"^\$ (.*)$", page, re.MULTILINE)[: len(ours)]
    for words in (shlex.split(command) for command in ours):
        if words[0] == "prefect":
            prefect_cli.parse_args(words[1:], exit_on_error=False, print_error=False)
    assert f"--type {GpuMeshWorker.type}" in ours[2]
    assert "my-reinforce" in (tmp_path / "prefect.yaml").read_text() and "rlhf/my-reinforce" in ours[-1]


class InitSite(PrefectSite):
    """A site whose terminals have the commands that `init` prints, word for word but for the server's port."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.home = folder / "first"
        _, self.server, self.worker, self.user = terminals(printed(self.home))
        make_model(self.home / "models" / "smollm2")
        program = self.home / "my_reinforce.py"  # its model is random and writes no number, so its copy scores lengths
        program.write_text(program.read_text().replace("response.isdecimal()", "(len(response) % 2)"))
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self.environment |= {"PATH": path, "HOME": str(folder), "PREFECT_SERVER_API_PORT": str(self.port)}
        del self.environment["PREFECT_API_URL"]

    def shell(self, commands: list[str]) -> list[str]:
        """The words that run commands as a terminal does."""
        return ["bash", "-ec", "\n".join(commands).replace("4200", str(self.port))]

    def start_server(self) -> None:
        """Start it as the first of the terminals."""
        self.start_process("server", self.shell(self.server))
        self.until(self._is_healthy, 90)

    def deploy(self) -> None:
        """Leave that to the worker's terminal."""

    def start_worker(self) -> None:
        """Create the pool, deploy, and start the worker."""
        self.start_process("worker", self.shell(self.worker))
        self.until(lambda: b"started!" in (self.folder / "worker.log").read_bytes(), 120)


@pytest.mark.slow
@pytest.mark.all
def test_the_path_through_prefect_works_as_it_is_written(tmp_path):
    """Server, pool, deployments, worker and a run, by the commands that `init` prints."""
    with everything_up(InitSite(tmp_path)) as site:
        words = {"env": site.environment, "cwd": site.home, "capture_output": True, "text": True, "timeout": 400}
        ended = subprocess.run(site.shell(site.user), check=False, **words)
        assert ended.returncode == 0, ended.stdout + ended.stderr + site.log()[-3000:]
        deployed = {found["name"] for found in site.ask("/deployments/filter", {})}
        assert deployed == {*DEPLOYMENTS, "my-reinforce"}
    folder = site.home / "runs" / "latest"
    steps = read_lines(folder / "metrics.jsonl")
    assert ["score.answer_alone" in step for step in steps][:10] == [True] * 10
    assert (folder / "actor" / "model.safetensors").is_file()
