"""Plays with environments and servers in the forms of TRL, Gymnasium, OpenEnv and MCP."""

import ast
import asyncio
import json
import os
import re
import subprocess
import sys
import time
import venv
from pathlib import Path

import pytest

from benchmarks.beside_trl.grpo_step import TRL_VERSION
from benchmarks.beside_trl.step_sides import TRL_NEEDS
from prefect_rlhf.engines.functions.plays.messages import Asks, Failed, Over, Told
from prefect_rlhf.engines.functions.plays.pool import PlayPool
from prefect_rlhf.engines.functions.signatures.load import load_play
from prefect_rlhf.engines.functions.signatures.play_function import PlayFunction
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.tasks.play import Play

HERE = Path(__file__).parent
TRL, GYMNASIUM = HERE / "of_trl_environment.py", HERE / "of_environments.py"
ROW = {"prompt": "count", "answer": "3", "seed": 8, "group_seed": 2**62 + 7}
SERVERS = {"numbers": {"command": sys.executable, "args": [str(HERE / "mcp_server.py")]}}


def settings(signature, function, **changed):
    fields = {"max_tokens": 64, "deadline_seconds": 20.0, "retries": 0, "workers": 1} | changed
    return Play(function=function, signature=signature, **fields).settings


def call(name, /, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@pytest.fixture
def talk():
    """Play rows with a model that says these turns; the return value has the end, and the answers, of the last row."""
    pools = []

    def play(settings, turns, rows=(ROW,)):
        pools.append(PlayPool(settings))
        for row in rows:
            pools[-1].open([row])
            end, answers = None, []
            while end is None:
                for event in pools[-1].events(5.0):
                    if isinstance(event, Asks):
                        answers.append(event.answer)
                        left = (64, settings.max_turns - event.turn - 1)
                        pools[-1].tell(Told(0, turns[event.turn], (7,), "stop", left))
                    else:
                        end = event
        return end, answers

    yield play
    for pool in pools:
        pool.close()


def python_with(folder, *packages):
    """The interpreter of a new environment with packages of the registry."""
    venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    installed = subprocess.run([python, "-m", "pip", "install", "-q", *packages], capture_output=True, check=False)
    if installed.returncode:
        pytest.skip(f"{', '.join(packages)} cannot be installed here")
    return python


def test_an_environment_of_trl_plays_as_in_trl(talk):
    turns = [call("increment", by=2), call("increment", by=-1) + call("increment"), "done"]
    end, answers = talk(settings("environment", f"{TRL}:Counter"), turns)
    tool = {"role": "tool", "content": "the counter is 2"}
    refused = {"role": "tool", "content": '{"error": "by is negative"}'}
    assert answers == [" Count to 3.", [tool], [refused, tool | {"content": "the counter is 3"}]]
    assert end == Over(0, 1.0, {}, {"tool_calls": 3.0, "bad_calls": 1.0, "tool_errors": 0.0})
    end, answers = talk(settings("environment", f"{TRL}:Silent", arguments={"start": 3}), ["done"])
    assert (end.score, answers) == (1.0, [None])


def test_an_error_of_an_environments_tool_is_an_answer_unless_it_is_to_fail_the_row(talk):
    """A ValueError refuses a call either way."""
    turns = [call("break_down") + call("increment", by=-1), "done"]
    end, (_, answer) = talk(settings("environment", f"{TRL}:Counter"), turns)
    refused = {"role": "tool", "content": '{"error": "by is negative"}'}
    assert answer == [refused | {"content": '{"error": "LookupError: the counter is gone"}'}, refused]
    assert end == Over(0, 0.0, {}, {"tool_calls": 2.0, "bad_calls": 1.0, "tool_errors": 1.0})
    strict = settings("environment", f"{TRL}:Counter", tool_errors="fail")
    end, (_, answer) = talk(strict, [call("increment", by=-1), call("break_down")])
    assert answer == [refused]
    assert re.search(r"LookupError: the counter is gone \(.*of_trl_environment.py:\d+ in break_down", end.reason)


@pytest.mark.parametrize(
    ("name", "turn", "reason"),
    [
        ("Odd", "", r"reset returned 3 of type int, not text \(.*of_trl_environment.py:\d+ in reset\)"),
    ],
)
def test_an_environment_that_fails_fails_its_row(talk, name, turn, reason):
    end, _ = talk(settings("environment", f"{TRL}:{name}"), [turn])
    assert isinstance(end, Failed)
    assert re.search(reason, end.reason)


@pytest.mark.parametrize(
    ("name", "changed", "says"),
    [
        ("WithoutReward", {}, "play.function: got .*expected a class with a method get_reward"),
        ("WithoutTools", {}, "play.function: got .*expected a class with public methods, the tools .* in reset"),
        ("Counter", {"arguments": {"begin": 1}}, "expected a class that takes play.arguments: TypeError: .*begin"),
        ("make_nothing", {}, r"expected a class with a method reset \(.*of_trl_environment.py:\d+ in make_nothing\)"),
        (
            "Brittle",
            {},
            r"expected code that signature environment can use: LookupError: no speed \(.*:\d+ in speed\)",
        ),
        ("Counte", {}, "expected a function in .*it has Counter"),
    ],
)
def test_a_class_without_environment_methods_is_refused_in_one_line(name, changed, says):
    with pytest.raises(InvalidInput, match=says) as refused:
        asyncio.run(load_play(PlayFunction.of(settings("environment", f"{TRL}:{name}", **changed))))
    assert "\n" not in str(refused.value)


def test_tools_of_an_mcp_server_and_a_server_that_dies(talk):
    pytest.importorskip("mcp")
    play = settings("mcp", f"{HERE / 'of_tools.py'}:length", arguments={"servers": SERVERS})
    turns = [call("add", a=2, b=3), call("refuse") + call("add", a="2", b=3) + call("count"), "5"]
    end, (_, first, second) = talk(play, turns, [ROW, ROW])
    assert [each["content"] for each in first] == ["5"]
    refused, misfit, counted = (each["content"] for each in second)
    assert refused == "Error executing tool refuse"
    assert json.loads(misfit) == {"error": "add: a is '2', expected integer"}
    assert counted == "2"  # the rows of a worker share its server
    assert end.numbers["tool_calls"] == 4
    end, _ = talk(play, [call("die")])
    assert re.fullmatch("tool die of MCP server numbers gave no answer: .*", end.reason)
    end, answers = talk(settings("mcp", play.function, arguments={"servers": SERVERS}, retries=1), [call("die")])
    assert isinstance(end, Failed)  # its second try has a server again, which dies too


@pytest.mark.all
def test_a_stateful_mcp_server_serves_a_single_row(talk):
    pytest.importorskip("mcp")
    arguments = {"servers": SERVERS, "stateful": True}
    _, answers = talk(
        settings("mcp", f"{HERE / 'of_tools.py'}:length", arguments=arguments), [call("count"), "1"], [ROW] * 2
    )
    assert answers[1] == [{"role": "tool", "content": "1"}]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({}, "play.arguments.servers: missing; expected servers by name, each with a command"),
        (
            {"servers": {"a": {"command": "/none"}}},
            "play.arguments.servers: got 'a', expected servers that answer: MCP ",
        ),
        ({"servers": {"a": {"comand": "x"}}}, "play.arguments.servers.a: got .*expected a command .*or a url"),
        *(
            (
                {"servers": {"a": {"url": "http://127.0.0.1"} | more}},
                "play.arguments.servers.a: got .*url', expected .*or a url alone",
            )
            for more in ({"cwd": "."}, {"env": {"TOKEN": "sekrit"}}, {"args": []})
        ),
        ({"servers": SERVERS, "stateless": True}, "play.arguments.stateless: unknown key .*it has servers, stateful"),
        ({"servers": SERVERS, "env": {"TOKEN": "sekrit"}}, "play.arguments.env: unknown key .got 'dict'.; it has serv"),
        *(
            ({"servers": {"a": {"command": "x", "cwd": cwd}}}, "play.arguments.servers.a.cwd: got .*expected the path")
            for cwd in (5, {"a": 1}, False, [])
        ),
        ({"servers": SERVERS, "stateful": "no"}, "play.arguments.stateful: got 'no', expected true or false"),
    ],
)
def test_servers_that_cannot_be_used_are_refused_in_one_line(arguments, says):
    pytest.importorskip("mcp")
    with pytest.raises(InvalidInput, match=says) as refused:
        asyncio.run(load_play(PlayFunction.of(settings("mcp", f"{HERE / 'of_tools.py'}:length", arguments=arguments))))
    assert "\n" not in str(refused.value)


def test_relative_paths_in_arguments_start_at_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    server, distant = {"command": "python", "args": ["a.py"]}, {"url": "http://127.0.0.1"}
    servers = {"here": server, "there": server | {"cwd": "tools"}, "far": distant}
    arguments = Play(function="a:b", signature="mcp", max_tokens=8, arguments={"servers": servers}).absolute().arguments
    here, there = server | {"cwd": str(tmp_path)}, server | {"cwd": str(tmp_path / "tools")}
    assert arguments == {"servers": {"here": here, "there": there, "far": distant}}
    for cwd in (5, {"a": 1}, False, []):
        wrong = {"servers": {"a": server | {"cwd": cwd}}}
        assert Play(function="a:b", signature="mcp", max_tokens=8, arguments=wrong).absolute().arguments == wrong
    client = {"base_url": "http://127.0.0.1", "action": "moves.py:Move"}
    arguments = Play(function="a:b", signature="openenv", max_tokens=8, arguments=client).absolute().arguments
    assert arguments == client | {"action": f"{tmp_path / 'moves.py'}:Move"}


def test_a_library_that_the_interpreter_lacks_is_named():
    with pytest.raises(InvalidInput, match="play.python: got .*expected an interpreter with gymnasium"):
        asyncio.run(load_play(PlayFunction.of(settings("gymnasium", "Guess-v0"))))
    with pytest.raises(InvalidInput, match="play.arguments.base_url: missing; expected the address of the environment"):
        settings("openenv", "echo_env:EchoEnv")


def test_an_environment_starts_from_the_seed_of_its_group(talk):
    """Rows of a prompt start alike, from a seed of at most 32 bits."""
    play = settings("openenv", f"{HERE / 'of_clients.py'}:Echo", arguments={"base_url": "http://127.0.0.1"})
    for seed in (8, 9):
        end, answers = talk(play, ["ha"], [ROW | {"seed": seed}])
        assert (answers, end.rewards) == (["\nseed 7"], {0: 1.0})


@pytest.mark.parametrize(
    ("prompt", "opening"),
    [
        ("Reply with a number.", "\nseed 7"),
        ("", "seed 7"),
        ([{"role": "user", "content": ""}], "seed 7"),
        ([{"role": "user", "content": "Reply."}, {"role": "assistant", "content": ""}], "\nseed 7"),
        ([{"role": "user", "content": [{"type": "text", "text": "Reply."}]}], "\nseed 7"),
    ],
)
def test_the_first_observation_starts_a_new_line_below_the_prompt(talk, prompt, opening):
    """An empty prompt has no line before it. The class of TRL above has none either: TRL writes no line break."""
    play = settings("openenv", f"{HERE / 'of_clients.py'}:Echo", arguments={"base_url": "http://127.0.0.1"})
    _, answers = talk(play, ["ha"], [ROW | {"prompt": prompt}])
    assert answers == [opening]


def test_an_error_of_a_step_is_an_observation_unless_it_is_to_fail_the_row(talk):
    """The row goes on, and the turn has no reward. A server that is lost fails the row either way."""
    client, arguments = f"{HERE / 'of_clients.py'}:Brittle", {"base_url": "http://127.0.0.1"}
    play = settings("openenv", client, arguments=arguments)
    end, answers = talk(play, ["break", "ha"])
    error = '{"error": "RuntimeError: Server error: no such move"}'
    assert answers[1] == {"role": "user", "content": error} or answers[1] == [{"role": "user", "content": error}]
    assert end == Over(0, None, {1: 1.0}, {"tool_errors": 1.0})
    end, _ = talk(play, ["lose", "ha"])
    assert re.fullmatch(r"ConnectionResetError: lost \(.*of_clients.py:\d+ in step\)", end.reason)
    end, _ = talk(settings("openenv", client, arguments=arguments, tool_errors="fail"), ["break", "ha"])
    assert re.fullmatch(r"RuntimeError: Server error: no such move \(.*of_clients.py:\d+ in step\)", end.reason)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            {"base_url": "a", "patiense": 1},
            r"play.arguments: got 'base_url, patiense', expected action, action_field, observation_field, and what the"
            r" client takes: base_url, patience; got an unexpected keyword argument 'patiense' \(.*:\d+ in __init__\)",
        ),
        ({"base_url": "a", "action_field": 3}, "play.arguments.action_field: got 3, expected a name"),
    ],
)
def test_arguments_that_a_client_does_not_take_are_refused(arguments, says):
    play = settings("openenv", f"{HERE / 'of_clients.py'}:Echo", arguments=arguments)
    with pytest.raises(InvalidInput, match=says):
        asyncio.run(load_play(PlayFunction.of(play)))


@pytest.mark.all
def test_an_environment_plays_in_trl_itself_as_here(talk, tmp_path):
    """The prompt, the texts of tools, and the reward are those of TRL's trainer, with the same class and turns."""
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(tmp_path)]
    packages = [f"trl=={TRL_VERSION}", *TRL_NEEDS]
    if subprocess.run([*command, *packages], capture_output=True, check=False).returncode:
        pytest.skip("TRL cannot be installed here")
    turns = [call("increment", by=2), call("increment", by=-1) + call("increment"), "done"]
    program = [sys.executable, str(HERE / "trl_itself.py"), "Counter", json.dumps(turns)]
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    environment = os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run(program, env=environment, capture_output=True, text=True, check=True, timeout=500)
    in_trl = json.loads(ran.stdout.splitlines()[-1])

    end, (opening, *answers) = talk(settings("environment", f"{TRL}:Counter"), turns)
    assert in_trl["prompt"] == [ROW["prompt"] + opening]
    assert in_trl["reward"] == [end.score] == [1.0]
    texts = [message["content"] for answer in answers for message in answer]
    of_trl = [message["content"] for message in in_trl["messages"] if message["role"] == "tool"]
    assert (texts[0], texts[2]) == (of_trl[0], of_trl[2])
    assert json.loads(texts[1]) == ast.literal_eval(of_trl[1]) == {"error": "by is negative"}  # TRL writes Python


@pytest.mark.all
def test_a_gymnasium_environment_plays_in_another_interpreter(talk, tmp_path):
    python = python_with(tmp_path / "env", "gymnasium")
    oracle = "import sys; import of_environments as e; env = e.make(); env.reset(seed=7); print(env.secret)"
    secret = int(subprocess.run([python, "-c", oracle], cwd=HERE, capture_output=True, check=True).stdout)
    wrong = "0" if secret else "7"
    for function in (f"{GYMNASIUM}:make", "of_environments:Guess-v0"):
        play = settings("gymnasium", function, python=python, arguments={"most": 8})
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(HERE)
            end, answers = talk(play, [wrong, str(secret)])
            answered, _ = talk(play, ["a number", str(secret)])
        said = {"role": "user", "content": "higher" if secret else "lower"}
        assert (answers, end) == (["\nbelow 8", [said]], Over(0, None, {0: 0.0, 1: 1.0}, {"tool_errors": 0.0}))
        assert answered == Over(0, None, {1: 1.0}, {"tool_errors": 1.0})
    strict = settings("gymnasium", f"{GYMNASIUM}:make", python=python, tool_errors="fail")
    end, _ = talk(strict, ["a number"])
    assert re.search(r"ValueError: no number: a number \(.*of_environments.py:\d+ in step\)", end.reason)
    with pytest.raises(
        InvalidInput, match=r"expected an environment whose actions and observations are Text spaces, not "
    ):
        talk(settings("gymnasium", f"{GYMNASIUM}:Numbers", python=python), [])
    with pytest.raises(InvalidInput, match=r"an environment of gymnasium, not None \(.*:\d+ in make_nothing\)"):
        talk(settings("gymnasium", f"{GYMNASIUM}:make_nothing", python=python), [])


@pytest.mark.all
def test_an_openenv_client_plays_in_another_interpreter(talk, tmp_path):
    python = python_with(tmp_path / "env", "openenv-core")
    server = subprocess.Popen([python, str(HERE / "openenv_server.py"), str(tmp_path / "port")])
    try:
        for _ in range(600):
            if (tmp_path / "port").exists() and (tmp_path / "port").read_text():
                break
            time.sleep(0.1)
        arguments = {"base_url": f"http://127.0.0.1:{(tmp_path / 'port').read_text()}"}
        client = "openenv.core.generic_client:GenericEnvClient"
        play = settings("openenv", client, python=python, arguments=arguments, retries=20)
        end, answers = talk(play, ["ha", "hahaha"])
    finally:
        server.kill()
        server.wait()
    assert answers == [" seed 7", [{"role": "user", "content": "you said ha"}]]
    assert end == Over(0, None, {0: 2.0, 1: 6.0}, {"tool_errors": 0.0})
    end, _ = talk(settings("openenv", client, python=python, arguments=arguments), ["ha"])
    assert isinstance(end, Failed)  # the server is dead


@pytest.mark.all
def test_mcp_1_serves_in_another_interpreter(talk, tmp_path):
    python = python_with(tmp_path / "env", "mcp<2")
    servers = {"numbers": SERVERS["numbers"] | {"command": python}}
    play = settings("mcp", f"{HERE / 'of_tools.py'}:length", python=python, arguments={"servers": servers})
    _, answers = talk(play, [call("add", a=2, b=3), "5"])
    assert answers[1] == [{"role": "tool", "content": "5"}]
    end, _ = talk(play, [call("die")])
    assert re.fullmatch("tool die of MCP server numbers gave no answer: .*", end.reason)
