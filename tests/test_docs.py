"""Every code block of the docs is run: Python as it stands, commands as a user types them, plans through the checks."""

import re
import shlex
from pathlib import Path

import pytest
import yaml
from prefect.testing.utilities import prefect_test_harness

from prefect_rlhf.flows.commands.cli import main
from prefect_rlhf.flows.forms.options import RunOptions
from prefect_rlhf.flows.ppo import ppo
from prefect_rlhf.flows.training.run import prepare
from prefect_rlhf.placement.lease import Lease
from prefect_rlhf.placement.mesh import ClusterShape
from tests.finished_steps import write_checkpoint
from tests.tiny import make_model, make_prompts, ppo_parameters

PROJECT = Path(__file__).parents[1]
PAGES = [PROJECT / "README.md", *sorted((PROJECT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^( *)```(\w+)([^\n]*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
CLUSTER = ClusterShape("desk", num_nodes=1, devices_per_node=2, device_memory_bytes=8 << 30)


def blocks(language):
    """(page, attributes, text) of each block in a language."""
    found = []
    for page in PAGES:
        for _, kind, attributes, text in BLOCK.findall(page.read_text()):
            if kind == language:
                found.append(pytest.param(attributes.strip(), text, id=f"{page.name}-{len(found)}"))
    return found


def commands():
    lines = [(param.id, line.strip()) for param in blocks("console") for line in param.values[1].splitlines()]
    return [
        pytest.param(line[2:].partition("#")[0].strip(), id=f"{id}-{line}")
        for id, line in lines
        if line.startswith("$ ")
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where a reader of the docs would be: with models and data, and the files that the docs say to save."""
    folder = tmp_path_factory.mktemp("reader")
    make_model(folder / "models" / "tiny")
    make_model(folder / "models" / "tiny-reward", scalar=True)
    (folder / "data").mkdir()
    make_prompts(folder / "data" / "prompts.parquet")
    parameters = ppo_parameters(folder)
    (folder / "parameters.yaml").write_text(yaml.safe_dump(parameters))
    for language in ("python", "yaml"):
        for attributes, text in (param.values for param in blocks(language)):
            if attributes.startswith("file="):
                (folder / attributes.removeprefix("file=")).write_text(text)
    write_checkpoint(prepared(folder).augmented, folder / "runs" / "amber-fox", step=1)
    return folder


def prepared(folder, **changes):
    """What a run in that folder decides before it uses a device."""
    options, arguments = RunOptions.split(ppo.validate_parameters(ppo_parameters(folder) | changes))
    lease = Lease("pool", "abc", CLUSTER, CLUSTER.whole, CLUSTER.whole.devices())
    return prepare(ppo.algorithm, arguments, options, lease)


@pytest.mark.parametrize(("attributes", "text"), blocks("python"))
def test_python_runs(folder, monkeypatch, attributes, text):
    monkeypatch.chdir(folder)
    if attributes.startswith("file="):
        monkeypatch.syspath_prepend(str(folder))
        __import__(attributes.removeprefix("file=").removesuffix(".py"))
    else:
        exec(compile(text, "docs", "exec"), {"__name__": "docs"})


@pytest.mark.parametrize(("attributes", "text"), blocks("yaml"))
def test_a_plan_in_the_docs_is_one_that_runs(folder, attributes, text):
    found = prepared(folder, plan=str(folder / attributes.partition("=")[2])).augmented.plan
    assert found.name == yaml.safe_load(text)["name"]


@pytest.mark.slow
@pytest.mark.parametrize("command", commands())
def test_commands_run(folder, monkeypatch, command):
    program, *arguments = shlex.split(command)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delenv("RLHF_LEASE", raising=False)
    if program == "prefect-rlhf" and arguments[0] == "plan":
        assert main(arguments) == 0  # takes no device, and no server
    elif program == "prefect-rlhf":
        assert "--dry-run" in arguments, "docs show dry runs, which end"
        with prefect_test_harness(server_startup_timeout=120):
            assert main(arguments) == 0
    elif program == "make":
        assert f"\n{arguments[0]}:" in (PROJECT / "Makefile").read_text()
    else:
        check_prefect_command(arguments)


def check_prefect_command(arguments):
    """Commands that need a server and a worker run for real in other files; here, what they name must exist."""
    assert any(word in arguments for word in ("deployment", "deploy", "work-pool", "worker"))
    deployments = yaml.safe_load((PROJECT / "prefect.yaml").read_text())["deployments"]
    for argument in arguments:
        if argument.startswith("rlhf/"):
            assert argument.removeprefix("rlhf/") in {deployment["name"] for deployment in deployments}


def test_pages_link_to_files_that_exist():
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert link.startswith("http") or (page.parent / link).exists(), f"{page.name} links to {link}"


def test_no_page_is_without_a_reader():
    """The README reaches every page."""
    readme = (PROJECT / "README.md").read_text()
    assert all(f"docs/{page.name}" in readme for page in PAGES[1:])
