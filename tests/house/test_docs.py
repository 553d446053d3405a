"""Every code block of the docs is run: Python as it stands, commands as a user types them, plans through the checks."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import chdir
from importlib import import_module
from itertools import takewhile
from pathlib import Path

import pytest
import yaml
from prefect.cli._app import _app as prefect_cli
from prefect.flows import load_flow_from_entrypoint
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools import validate
from test_first_screen import first_screen

from benchmarks.demo.__main__ import ACTIONS
from prefect_rlhf.blocks.cluster import Cluster
from prefect_rlhf.blocks.worker.worker import GpuMeshWorker
from prefect_rlhf.errors.errors import GraphError
from prefect_rlhf.flows.algorithm.rlhf_flow import AlgorithmFlow
from prefect_rlhf.flows.commands.cli import COMMANDS
from prefect_rlhf.flows.commands.flags import app_of
from prefect_rlhf.flows.commands.graph import read_graph
from prefect_rlhf.flows.commands.init import project, write_new
from prefect_rlhf.flows.forms.options import RunOptions
from prefect_rlhf.flows.grpo import grpo
from prefect_rlhf.flows.ppo import ppo
from prefect_rlhf.flows.sft import sft
from prefect_rlhf.placement.devices.mesh import ClusterShape
from prefect_rlhf.placement.graph import Dataset
from prefect_rlhf.placement.models.model import ModelSpec, TransformerShape
from prefect_rlhf.tasks.rl.losses import policy_gradient
from prefect_rlhf.tasks.rl.settings.offline import DPO
from prefect_rlhf.tasks.rl.settings.online import GRPO
from prefect_rlhf.tasks.tracing.calls import generate, train_step
from prefect_rlhf.tasks.tracing.trace import trace_body
from tests import vocabulary
from tests.door import public_names
from tests.support import runs
from tests.support.finished_steps import write_checkpoint
from tests.support.migrated_database import put_database
from tests.support.tiny import make_model, make_pairs, make_prompts

PROJECT = Path(__file__).parents[2]
PAGES = [PROJECT / "README.md", *sorted((PROJECT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^( *)```(\w+)([^\n]*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
PPO = PROJECT / "docs" / "examples" / "ppo.yaml"
SERVER = "vllm.entrypoints.openai.api_server"
SLOWLY = ("run", "evaluate", "chat", "profile")
"""Commands that import an engine or plan a whole run: tests of runs and of a trained folder start them."""
FIRST = "first"  # the folder that docs/install.md has `prefect-rlhf init` make
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
    """Each command except `cd first`; `make test` runs the first of ours for each quick command of the program."""
    params, ran = [], set()
    for block in blocks("console"):
        if block.id.startswith("will_it_fit.md"):
            continue  # test_will_it_fit.py runs these and compares what they print
        for line in block.values[1].splitlines():
            if not line.strip().startswith("$ "):
                continue
            command = line.strip()[2:].partition("#")[0].strip()
            if command == f"cd {FIRST}":
                continue
            named = named_command(shlex.split(command)) if command.startswith("prefect-rlhf") else None
            marks = [pytest.mark.all] if named in {*ran, *SLOWLY} or SERVER in command else []
            params.append(pytest.param(command, id=f"{block.id}-{line.strip()}", marks=marks))
            ran |= {named} if named else set()
    return params


def named_command(words):
    """The command of the program: an algorithm alone is short for `run`."""
    return words[1] if words[1] in COMMANDS else "run"


def table_rows(name):
    """The cells of each row of a page's tables."""
    lines = (PROJECT / "docs" / name).read_text().splitlines()
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("| ")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder that docs/install.md has a reader make. Models and data are small, with the names of real ones.

    The files that the docs say to save are in it, and what the commands of its table make.
    """
    clone = tmp_path_factory.mktemp("clone")
    shutil.copytree(PROJECT / "docs" / "examples", clone / "docs" / "examples")
    folder = clone / FIRST
    write_new(folder, project(folder))
    make_model(folder / "models" / "smollm2", context=1024)  # prompts with tools are long
    make_model(folder / "runs" / "reward" / "an-earlier-run" / "reward", scalar=True)
    make_model(folder / "runs" / "the-first-run" / "actor")
    (folder / "runs" / "latest").symlink_to("the-first-run")
    caller = make_model(folder / "runs" / "calls" / "an-earlier-run" / "actor", context=1024)
    shutil.copy(folder / "tools.jinja", Path(caller) / "chat_template.jinja")
    for name in ("reward", "calls"):
        (folder / "runs" / name / "latest").symlink_to("an-earlier-run")
    put_database(folder / "prefect")
    (folder / "data").mkdir()
    make_prompts(folder / "data" / "prompts.parquet", num_train=32)
    make_pairs(folder / "data" / "preferences.parquet", num_train=32, num_held_out=32)
    for language in ("python", "yaml", "json", "text"):
        for attributes, text in (param.values for param in blocks(language)):
            if attributes.startswith("file="):
                (folder / attributes.split()[0].removeprefix("file=")).write_text(text)
    subprocess.run([sys.executable, "make_chats.py"], cwd=folder, check=True, timeout=300)  # a command of a page
    run = prepared(folder)
    write_checkpoint(run.augmented, folder / "runs" / "ppo" / "amber-fox", step=1, lineage=run.request.lineage)
    return folder


def prepared(folder, **changes):
    """What a run in that folder decides before it uses a device."""
    with chdir(folder):
        return runs.prepared(ppo, yaml.safe_load(PPO.read_text()) | changes, runs.whole(CLUSTER))


@pytest.mark.parametrize(("attributes", "text"), blocks("python"))
def test_python_runs(folder, monkeypatch, attributes, text):
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    if "math_verify" in text:  # of the extra `rewards`, which need not be installed
        pytest.importorskip("math_verify")
    if attributes.startswith("file="):
        module = import_module(attributes.removeprefix("file=").removesuffix(".py"))
        for flow in vars(module).values():
            if isinstance(flow, AlgorithmFlow) and flow.algorithm.body.__module__ == module.__name__:
                assert read_graph(flow, flow.algorithm.name, {}).calls  # as `prefect-rlhf graph` traces it
    else:
        exec(compile(text, "docs", "exec"), {"__name__": "docs"})


@pytest.mark.parametrize("page", ["README.md", "authoring.md"])
def test_the_program_of_the_page_is_the_file_that_init_writes_and_the_first_run_trains(page):
    """Byte for byte; the last command of docs/install.md runs it with the parameters that `init` writes next to it."""
    found = [param for param in blocks("python") if param.values[0].startswith("file=my_reinforce")]
    (text,) = [param.values[1] for param in found if param.id.startswith(f"{page}-")]
    assert text == (PROJECT / "src" / "prefect_rlhf" / "template" / "my_reinforce.py").read_text()
    if page == "README.md":
        run = "prefect-rlhf run my_reinforce.py:reinforce --parameters parameters.yaml"
        assert first_screen()[-1].startswith(run)


@pytest.mark.parametrize(("attributes", "text"), blocks("yaml"))
def test_yaml_is_a_plan_that_runs_or_accepted_parameters(folder, monkeypatch, attributes, text):
    """Parameters are of GRPO; what a block leaves out is that of `my_grpo.yaml`. Those of PPO are without a critic."""
    loaded = yaml.safe_load(text)
    if "node_kinds" in loaded:
        assert Cluster(**loaded).shape.node_devices == ("h100", "h100", "a100-40")
    elif "deployments" in loaded:
        assert text == (PROJECT / "docs" / "examples" / loaded["name"].replace("-", "_") / "prefect.yaml").read_text()
    elif loaded.get("kind") == "RayCluster":
        check_ray_cluster(loaded["spec"])
    elif "calls" in loaded:
        found = prepared(folder, plan=str(folder / attributes.partition("=")[2])).augmented.plan
        assert found.name == loaded["name"]
    elif "flow=sft" in attributes:
        assert sft.validate_parameters(loaded)["actor"].chat_template == "tools.jinja"
    elif attributes == "flow=ppo":
        whole = yaml.safe_load(PPO.read_text()) | loaded
        checked = ppo.validate_parameters({name: value for name, value in whole.items() if name != "critic"})
        assert checked["actor"].head == "lm+scalar"
    else:
        monkeypatch.chdir(folder)
        checked = grpo.validate_parameters(yaml.safe_load(Path("my_grpo.yaml").read_text()) | loaded)
        assert checked["play"].settings if "play" in loaded else checked["reward"].host_functions


def check_ray_cluster(spec):
    """Ray's version is the one that is installed here, and every node sees the volume that the page speaks of."""
    assert f"ray=={spec['rayVersion']}" in (PROJECT / "constraints.txt").read_text().splitlines()
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        mounted = {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]}
        assert "shared" in mounted and mounted == {volume["name"] for volume in pod["volumes"]}


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (settings, row[1])
        for page, settings in (("grpo.md", GRPO), ("offline.md", DPO))
        for row in table_rows(page)
        if row[1][:2] == "`{"
    ],
)
def test_each_algorithms_settings_are_accepted_as_written(settings, text):
    algo = yaml.safe_load(text.strip("`"))
    assert settings.model_validate(algo).model_dump(exclude_unset=True) == algo


@pytest.mark.parametrize(("body", "says"), [row for row in table_rows("authoring.md") if "flow mine: " in row[1]])
def test_a_body_that_cannot_run_is_refused_in_the_pages_words(body, says):
    arguments = {name: object() for name in ("actor", "prompts", "pretrain")}
    models = {
        "actor": ModelSpec("actor", "actor", "lm", TransformerShape(64, 128, 4, 4, 2, 16, 100, 64, 1e4, 1e-5, True))
    }
    datasets = {
        "prompts": Dataset("prompts", ("prompt_tokens",), 64),
        "pretrain": Dataset("pretrain", ("tokens", "prompt_length"), 64, rows_per_item=2),
    }
    words = {"generate": generate, "train_step": train_step, "loss": policy_gradient(GRPO())}

    def run(**arguments):
        exec(body.strip("`"), words | arguments)

    with pytest.raises(GraphError) as refused:
        trace_body("mine", run, arguments, models, datasets)
    line, _, place = str(refused.value).rpartition(" (")
    assert line == says.strip("`") and place.endswith(" in run)")


@pytest.mark.parametrize("command", [one.values[0] for one in commands() if "prefect-rlhf " in one.values[0]])
def test_flags_of_a_command_exist(command):
    words = [word for word in shlex.split(command) if not word.startswith("RAY_ADDRESS=")]
    name = named_command(words)
    module = import_module(f"prefect_rlhf.flows.commands.{name}")
    flags = words[2:] if words[1] == name else words[1:]
    app_of(getattr(module, name)).parse_args(flags, exit_on_error=False, print_error=False)


@pytest.mark.slow
@pytest.mark.parametrize("command", commands())
def test_commands_run(folder, tmp_path, command):
    """In a process of their own, as a person starts them in the folder of the files: without server or PYTHONPATH."""
    program, *arguments = [word for word in shlex.split(command) if not word.startswith("RAY_ADDRESS=")]
    if program == "prefect-rlhf" and arguments[0] in ("nodes", "doctor"):
        pass  # they start Ray and engines: test_many_nodes.py and test_checkup.py do
    elif program == "docker":
        pass  # test_recipes.py has a linter read the image's recipe
    elif program == "prefect-rlhf":
        check_our_command(program, arguments, tmp_path if arguments[0] == "init" else folder, folder / "prefect")
    elif program == "make":
        assert f"\n{arguments[0]}:" in (PROJECT / "Makefile").read_text()
    elif program in ("python3.11", ".", "pip"):
        assert command in first_screen()  # test_first_screen.py runs them
    elif program == "hf" or arguments[:2] == ["-m", SERVER]:
        check_foreign_command(program, arguments, folder)
    elif program == "python" and arguments[0].endswith(".py"):
        assert (folder / arguments[0]).is_file()  # the folder's files were made by it
    elif program == "python":
        assert arguments[:2] == ["-m", "benchmarks.demo"] and arguments[2] in ACTIONS
    elif program == "export":
        assert arguments == ["PREFECT_API_URL=http://127.0.0.1:4200/api"]
    else:
        check_prefect_command(arguments)


def check_our_command(program, arguments, cwd, home):
    """It ends without an error; what trains is a dry run, since other files run it for real."""
    if (
        arguments[0] not in ("plan", "graph", "init", "profile", "chat", "runs", "translate")
        and "--dry-run" not in arguments
    ):
        arguments.append("--dry-run")
    script = Path(sys.executable).with_name(program)
    unset = ("PYTHONPATH", "RLHF_LEASE", "PREFECT_API_URL")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    environment["PREFECT_HOME"] = str(home)
    environment["PATH"] = f"{script.parent}{os.pathsep}{environment['PATH']}"  # as in an active environment
    words = {"cwd": cwd, "env": environment, "timeout": 560, "capture_output": True, "text": True}
    done = subprocess.run([script, *arguments], **words, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def check_foreign_command(program, arguments, folder):
    """The command and its flags exist, and a folder that it reads is a model; test_trained_folder.py serves it."""
    script = Path(sys.executable).with_name(program)
    named = arguments[:2] if SERVER in arguments else takewhile(lambda word: word.isalpha(), arguments)
    words = {"cwd": folder, "timeout": 300, "capture_output": True, "text": True}
    told = subprocess.run(
        [script, *named, "--help=all" if SERVER in arguments else "--help"], **words, check=True
    ).stdout
    flags = {word.partition("=")[0] for word in arguments if word.startswith("--")}
    assert flags <= set(re.findall(r"--[\w-]+", told))
    assert all((folder / word / "config.json").is_file() for word in arguments if word.startswith("runs/"))


def check_prefect_command(arguments):
    """Commands that need a server and a worker run for real in other files; here, what they name must exist."""
    prefect_cli.parse_args(arguments, exit_on_error=False, print_error=False)
    if "--type" in arguments:
        assert GpuMeshWorker.type in arguments
    deployments = yaml.safe_load((PROJECT / "prefect.yaml").read_text())["deployments"]
    for argument in arguments:
        if argument.startswith("rlhf/"):
            assert argument.removeprefix("rlhf/") in {"my-reinforce"} | {one["name"] for one in deployments}


@pytest.mark.parametrize("name", ["reward", "ppo", "grpo", "remax", "sft", "dpo", "kto", "cost", "safe-rlhf"])
def test_a_deployment_has_parameters_that_its_flow_takes(name):
    """By the schema that Prefect enforces when a run is made, and by the flow itself."""
    text = (PROJECT / "prefect.yaml").read_text().replace("{{ $RLHF_HOME }}", "/home")
    (deployment,) = [one for one in yaml.safe_load(text)["deployments"] if one["name"] == name]
    flow = load_flow_from_entrypoint(deployment["entrypoint"])
    validate(deployment["parameters"], parameter_schema(flow).model_dump(), raise_on_error=True)
    assert flow.validate_parameters(deployment["parameters"]).keys() >= deployment["parameters"].keys()


def test_the_default_plan_is_the_same_in_code_forms_and_pages():
    """In the options of a run, the template, the deployments without a plan, and the page on plans."""
    default = RunOptions().plan
    template = yaml.safe_load((PROJECT / "src" / "prefect_rlhf" / "template" / "parameters.yaml").read_text())
    assert template["plan"] == default
    deployments = yaml.safe_load((PROJECT / "prefect.yaml").read_text())["deployments"]
    searched = {each["name"] for each in deployments if each["parameters"].get("plan", default) != default}
    assert searched == {"ppo", "remax", "safe-rlhf"}
    section = (PROJECT / "docs" / "plans.md").read_text().split("\n## The default\n")[1].split("\n## ")[0]
    assert f"A run without `plan` uses `{default}`" in section
    assert set(re.findall(r"`rlhf/([\w-]+)`", section)) == searched


def test_the_vocabulary_has_every_name_that_authors_may_import():
    text = vocabulary.page()
    heads = set(re.findall(r"^### `?([\w.]+)|^\| `([\w.]+)` \|", text, re.MULTILINE))
    assert public_names().keys() - {one or other for one, other in heads} == set()


def test_the_vocabulary_matches_the_code():
    """`python -m tests.vocabulary` writes it anew."""
    assert vocabulary.PAGE.read_text() == vocabulary.page()


def test_pages_link_to_files_that_exist():
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert link.startswith("http") or (page.parent / link).exists(), f"{page.name} links to {link}"


def test_each_decision_has_a_number_of_its_own():
    """In its file's name and in its heading, one after another."""
    records = sorted((PROJECT / "docs" / "adr").glob("*.md"))
    for number, record in enumerate(records, 1):
        assert record.name.startswith(f"{number:04d}-"), f"{record.name} is record {number}"
        assert record.read_text().startswith(f"# {number}. "), f"{record.name} begins with another number"


def test_no_page_is_without_a_reader():
    """The README links to the index, and the index to every page."""
    assert "(docs/index.md)" in (PROJECT / "README.md").read_text()
    index = PROJECT / "docs" / "index.md"
    assert [page.name for page in PAGES[1:] if page != index and f"({page.name})" not in index.read_text()] == []


def test_the_readme_prices_a_plan_as_the_page_of_answers_does():
    """The memory and the dollars of a step, which a test of that page asks for again."""
    (line,) = re.findall(r"^- \*\*it fits\*\*.*$", (PROJECT / "README.md").read_text(), re.MULTILINE)
    figures = re.findall(r"[\d.]+ of [\d.]+ GiB|\$[\d.]+(?= a step)", line)
    answers = (PROJECT / "docs" / "will_it_fit.md").read_text()
    assert len(figures) == 2 and [figure for figure in figures if figure not in answers] == []


def test_the_readme_is_short():
    """The program of the first run is almost half of it."""
    assert len((PROJECT / "README.md").read_text().splitlines()) <= 90


def test_a_file_that_pages_name_is_in_the_table_of_files(folder):
    """Of the folders that the commands of docs/install.md make."""
    named = "|".join(f"`{row[0].strip('`')}`" for row in table_rows("install.md"))
    text = "\n".join(page.read_text() for page in [*PAGES, *sorted((PROJECT / "docs" / "examples").glob("*.yaml"))])
    found = set(re.findall(r"(?:path: |\.path=|profile |tokenizer=\")((?:models|data|runs)/[^\s,}\"*]+)", text))
    assert {name for name in found if f"`{name}`" not in named} == set()
    assert {"models/smollm2", "data/prompts.parquet", "runs/reward/latest/reward"} <= found
    assert all((folder / name).exists() for name in found)
