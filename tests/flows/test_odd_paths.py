"""Paths that no file can have, and folders that a run must leave alone: one line, for every parameter with a path."""

import json

import pytest

from prefect_rlhf.errors.errors import InvalidInput, RlhfError
from prefect_rlhf.flows.commands.cli import main
from prefect_rlhf.flows.grpo import grpo
from prefect_rlhf.flows.ppo import ppo
from prefect_rlhf.flows.training.run import link_latest
from prefect_rlhf.placement.devices.mesh import ClusterShape
from tests.support.runs import prepared, whole
from tests.support.tiny import ppo_parameters

pytestmark = pytest.mark.quick

DESK = whole(ClusterShape("desk", num_nodes=1, devices_per_node=1, device_memory_bytes=8 << 30))
OF_PPO = ("prompts.path", "held_out.path", "actor.path", "ref.path", "critic.path", "reward.path")
OF_PPO += ("plan", "resume_from", "output_dir", "expected_response_length")
OF_GRPO = ("reward.functions.mine.function", "play.function", "play.python", "play.tools.0")
OF_GRPO += ("play.arguments.servers.one.cwd", "play.arguments.servers.one.command")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a link that leads to itself, and one that leads nowhere."""
    folder = tmp_path_factory.mktemp("odd")
    for name, target in (("loop", "loop"), ("loop.py", "loop.py"), ("gone", "nothing")):
        (folder / name).symlink_to(folder / target)
    return folder


@pytest.fixture(scope="module")
def given(folder):
    return ppo_parameters(folder)


def at(parameters, path, value):
    """A copy of parameters with the value at a dotted path; a number is a place in a list."""
    *groups, last = path.split(".")
    copy = place = json.loads(json.dumps(parameters))
    for group in groups:
        place = place[int(group)] if group.isdigit() else place.setdefault(group, {})
    place[int(last) if last.isdigit() else last] = value
    return copy


def of_grpo(given, path):
    """Parameters of GRPO that use the one at a path."""
    shared = {name: given[name] for name in ("prompts", "held_out", "actor", "ref", "output_dir", "steps")}
    shared |= {"algo": {"batch_size": 4, "samples_per_prompt": 2}}
    if path.startswith("reward"):
        return shared | {"reward": {"functions": {"mine": {"function": "a.py:f"}}}}
    play = {"function": "a.py:f", "max_tokens": 32}
    if "tools" in path:
        play |= {"signature": "tools", "tools": ["a.py:f"]}
    if "servers" in path:
        play |= {"signature": "mcp", "arguments": {"servers": {"one": {"command": "true"}}}}
    return shared | {"reward": {"path": given["reward"]["path"], "head": "scalar"}, "play": play}


def refusal(flow, parameters):
    """The line that refuses a run. Any other error, or none, fails the test."""
    with pytest.raises(RlhfError) as refused:
        prepared(flow, parameters, DESK)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (path, value)
        for path in OF_PPO
        for value in ("a\0b", "loop", "loop/inside", "gone/inside")
        if (path, value) != ("output_dir", "gone/inside")  # a run makes missing folders
    ],
)
def test_no_path_of_a_run_ends_in_a_traceback(given, folder, path, value):
    """A NUL, and links that lead to themselves or nowhere."""
    assert path.split(".")[0] in refusal(ppo, at(given, path, f"{folder}/{value}"))


@pytest.mark.parametrize("value", ["a\0b", "loop.py:f", "loop/inside.py:f"])
@pytest.mark.parametrize("path", OF_GRPO)
def test_no_path_of_code_ends_in_a_traceback(given, folder, path, value):
    found = refusal(grpo, at(of_grpo(given, path), path, f"{folder}/{value}"))
    assert path.split(".")[0] in found


@pytest.mark.parametrize("place", ["loop.py:f", "loop/inside.py:f", "a\0b.py:f"])
def test_no_path_of_a_command_ends_in_a_traceback(folder, place, capsys):
    assert main(["run", f"{folder}/{place}", "--dry-run"]) == 2
    assert main(["run", "ppo", "--parameters", f"{folder}/{place}", "--dry-run"]) == 2
    assert capsys.readouterr().err.count("\n") == 2


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_users_own_latest_is_refused_before_devices_and_never_replaced(given, tmp_path, kind, caplog):
    """Also if it comes while the run trains: the run completes, with a warning."""
    latest = tmp_path / "latest"
    latest.write_text("mine") if kind == "file" else latest.mkdir()
    says = f"output_dir: got '{latest}', expected a folder without a {kind} of that name"
    assert says in refusal(ppo, given | {"output_dir": str(tmp_path)})
    link_latest(tmp_path / "fox")
    assert not latest.is_symlink() and says in caplog.text


def test_latest_of_an_earlier_run_is_replaced(given, tmp_path):
    """Even if its folder is gone."""
    (tmp_path / "latest").symlink_to("gone")
    prepared(ppo, given | {"output_dir": str(tmp_path)}, DESK)
    link_latest(tmp_path / "fox")
    assert (tmp_path / "latest").readlink().name == "fox"


def test_a_value_that_is_set_twice_is_refused(capsys):
    """Also where a group would replace a part of it; a group may be completed."""
    for twice in (["steps=1", "steps=2"], ["actor.path=a", "actor={path: b}"]):
        assert main(["run", "ppo", *(word for text in twice for word in ("-p", text)), "--dry-run"]) == 2
        assert f"--param: got '{twice[1]}', expected a single value of" in capsys.readouterr().err
    assert main(["run", "ppo", "-p", "actor={path: /none}", "-p", "actor.head=lm", "--dry-run"]) == 2
    assert "single value" not in capsys.readouterr().err
    assert main(["plan", "ppo", "--model", "actor=llama-7b", "--model", "actor=llama-70b"]) == 2
    assert "--model: got 'actor=llama-70b', expected a single value of actor" in capsys.readouterr().err


def test_a_path_mistake_has_its_own_kind(given):
    with pytest.raises(InvalidInput, match="text without NUL characters"):
        prepared(ppo, at(given, "algo.sampling.stop", ["a\0"]), DESK)
