"""Connections to MCP servers: an error of a call costs no other row its server, and nothing waits without a limit."""

import asyncio
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from prefect_rlhf.engines.functions.plays.messages import Asks, Failed, Over, Told
from prefect_rlhf.engines.functions.plays.pool import PlayPool
from prefect_rlhf.engines.functions.signatures.load import load_play
from prefect_rlhf.engines.functions.signatures.loaded import PlayFailed
from prefect_rlhf.engines.functions.signatures.play_function import PlayFunction
from prefect_rlhf.engines.functions.signatures.tools import ToolCall, answered
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.tasks.play import Play

pytest.importorskip("mcp")
mcp = pytest.importorskip("prefect_rlhf.engines.functions.signatures.mcp")

HERE = Path(__file__).parent
TOOLS = ["pid", "error", "bad_arguments", "die", "wait", "odd", "stranger", "garble"]
NO_ANSWER = "play.arguments.servers: got 'lines', expected servers that answer: MCP server lines"
NO_TOOLS = "play.arguments.servers.lines: got 'a server without tools', expected a server with tools"
LOCKED = "^tool error of MCP server lines answered with an error: MCPError: the index is locked$"


def servers(case):
    return {"lines": {"command": sys.executable, "args": [str(HERE / "mcp_lines.py"), case]}}


def with_server(scenario, **more):
    """Run a coroutine function of a server's tools by name, each called with arguments."""

    async def run():
        connected = mcp.Servers({"lines": servers("")["lines"] | more}, 60.0)
        tools = connected.tools(await connected.schemas())

        async def call(name, **arguments):
            return (await answered(ToolCall(name, arguments), tools))[0]

        try:
            return await scenario(call)
        finally:
            connected.close()

    return asyncio.run(run())


async def pid(call):
    return int((await call("pid")).split()[0])


def test_all_pages_of_the_list_of_tools_are_read():
    async def scenario():
        connected = mcp.Servers(servers(""), 60.0)
        schemas = await connected.schemas()
        connected.close()
        return [schema["function"]["name"] for schema in schemas["lines"]]

    assert asyncio.run(scenario()) == TOOLS


def test_a_tool_that_takes_further_arguments_gets_them():
    async def scenario(call):
        return await call("pid", word="gut", number=3)

    assert with_server(scenario).endswith(' {"word": "gut", "number": 3}')


def test_a_server_has_the_variables_of_its_worker_and_its_own(monkeypatch):
    """The pool gives a worker few, so `play.environment_variables` names a secret that is no parameter."""
    monkeypatch.setenv("NOTES_TOKEN", "of the worker")

    async def scenario(call):
        return Path(f"/proc/{await pid(call)}/environ").read_text().split("\0")

    assert {"NOTES_TOKEN=of the worker", "LEVEL=3"} <= set(with_server(scenario, env={"LEVEL": "3"}))


def test_an_error_of_a_call_leaves_the_server_to_other_rows():
    """A call that still waits is answered too, and the server keeps its process."""

    async def scenario(call):
        waits = asyncio.create_task(call("pid", slow=True))
        first = await pid(call)
        with pytest.raises(PlayFailed, match=LOCKED):
            await call("error")
        assert await call("bad_arguments") == '{"error": "word is missing"}'
        assert await pid(call) == first
        os.kill(first, signal.SIGUSR1)
        assert (await waits).startswith(f"{first} ")

    with_server(scenario)


def test_a_call_that_is_ended_leaves_the_server_to_calls_that_wait():
    """They hear its own answers, and the next row has another server."""

    async def scenario(call):
        waits, fails, ended = (asyncio.create_task(call(name, slow=True)) for name in ("pid", "error", "pid"))
        first = await pid(call)
        ended.cancel()
        with pytest.raises(asyncio.CancelledError):
            await ended
        while not (fails.done() and waits.done()):  # the server may not have read all calls when a signal comes
            os.kill(first, signal.SIGUSR1)
            await asyncio.sleep(0.1)
        with pytest.raises(PlayFailed, match=LOCKED):
            await fails
        assert (await waits).startswith(f"{first} ")
        assert await pid(call) != first

    with_server(scenario)


def test_a_server_that_died_between_two_calls_is_started_again():
    async def scenario(call):
        first = await pid(call)
        os.kill(first, signal.SIGKILL)
        with pytest.raises(PlayFailed, match="^tool pid of MCP server lines gave no answer: "):
            await call("pid")
        assert await pid(call) != first

    with_server(scenario)


def test_a_call_that_is_ended_costs_a_server_that_hangs():
    """The next row has another server, although the first does not answer even now."""

    async def scenario(call):
        first = await pid(call)
        waits = asyncio.create_task(call("wait"))
        await asyncio.sleep(0.3)
        waits.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waits
        assert await pid(call) != first
        os.kill(first, signal.SIGKILL)  # else the loop's end would wait for it

    with_server(scenario)


@pytest.mark.parametrize(
    ("case", "seconds", "says"),
    [
        pytest.param(
            "deaf", 2.0, f"{NO_ANSWER} did not start within 1 s, half of play.start_seconds", marks=pytest.mark.all
        ),
        ("no listing", 4.0, f"{NO_ANSWER} did not list its tools within 3 s, three quarters of play.start_seconds"),
        ("dies", 60.0, f"{NO_ANSWER} did not start: MCPError: Connection closed"),
        ("errs", 60.0, f"{NO_ANSWER} did not start: MCPError: ... is no key"),
        ("odd", 60.0, f"{NO_ANSWER} did not start: ValidationError: Initialize"),
        ("empty", 60.0, NO_TOOLS),
        ("no method", 60.0, NO_TOOLS),
    ],
)
def test_a_server_that_does_not_show_tools_is_refused(monkeypatch, case, seconds, says):
    """The line names the server and the cause, without secrets. One that hangs at its start, and does not end when
    asked, delays nobody.
    """
    monkeypatch.setenv("NOTES_TOKEN", "sekrit-token")
    play = Play(
        function=f"{HERE / 'of_tools.py'}:length",
        signature="mcp",
        max_tokens=8,
        start_seconds=seconds,
        arguments={"servers": servers(case)},
        environment_variables=("NOTES_TOKEN",),
    )
    with pytest.raises(InvalidInput, match=says) as refused:
        asyncio.run(load_play(PlayFunction.of(play.settings)))
    assert "\n" not in str(refused.value)


@pytest.fixture
def ends_of():
    """Play a row for each tool, whose model calls it; return the rows' ends. A server that is lost is started again."""
    pools = []

    def play(tools, **changed):
        play = Play(
            function=f"{HERE / 'of_tools.py'}:length",
            signature="mcp",
            max_tokens=64,
            retries=0,
            workers=1,
            arguments={"servers": servers("")},
            **changed,
        )
        pools.append(PlayPool(play.settings))
        return [end_of(pools[-1], tool) for tool in tools]

    yield play
    for pool in pools:
        pool.close()


def end_of(pool, tool):
    pool.open([{"prompt": "which server?"}])
    turns = [f'<tool_call>{{"name": "{tool}", "arguments": {{}}}}</tool_call>', "done"]
    while True:
        for event in pool.events(5.0):
            if not isinstance(event, Asks):
                return event
            pool.tell(Told(0, turns[event.turn], (7,), "stop", (64, 7 - event.turn)))


def test_a_server_that_dies_in_the_middle_fails_the_row_that_called_it(ends_of):
    """Rows before and after it end well: the next has another server."""
    ends = ends_of(("pid", "die", "pid"))
    assert [type(end) for end in ends] == [Over, Failed, Over]
    assert ends[1].reason == "tool die of MCP server lines gave no answer: MCPError: Connection closed"


def test_a_call_that_is_not_answered_or_answered_wrongly_fails_its_row_with_server_tool_and_cause(ends_of):
    """Never with the place of the function that scores: it was not called."""
    late = "no answer after 2 s (tool {} of MCP server lines)"
    wrong = "tool odd of MCP server lines gave no answer: ValidationError: CallToolResult.content: Input should be a "
    ends = ends_of(("wait", "stranger", "garble", "odd", "pid"), deadline_seconds=2.0)
    assert [end.reason for end in ends[:3]] == [late.format(tool) for tool in ("wait", "stranger", "garble")]
    assert ends[3].reason.startswith(wrong)
    assert isinstance(ends[4], Over)


def test_an_error_with_which_a_server_answers_a_call_is_an_answer_unless_it_is_to_fail_the_row(ends_of):
    (end,) = ends_of(("error",))
    counts = {"tool_calls": 1.0, "bad_calls": 0.0, "tool_errors": 1.0}
    text = '{"error": "MCPError: the index is locked"}'
    assert end == Over(0, 4.0, {}, counts | {"characters": float(len(text))})
    (end,) = ends_of(("error",), tool_errors="fail")
    assert re.search(LOCKED, end.reason)
