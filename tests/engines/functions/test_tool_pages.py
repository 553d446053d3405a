"""The tools and the MCP server that the pages show answer as the pages say; no model is needed for that."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from prefect_rlhf.tasks.play import Play
from tests.engines.functions.test_tool_plays import call, contents, pool_of, talk  # noqa: F401  a fixture

DOCS = Path(__file__).parents[3] / "docs"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The files that the two pages have a reader save, and those that the first page's script writes."""
    folder = tmp_path_factory.mktemp("first")
    for page in ("tools_from_the_start.md", "environments.md"):
        files = re.findall(r"^```\w+ file=(\S+)[^\n]*\n(.*?)^```$", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)
        for name, text in files:
            (folder / name).write_text(text)
    subprocess.run([sys.executable, "make_chats.py"], cwd=folder, check=True, timeout=120)
    return folder


def lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_the_tools_of_the_shop_answer_as_the_chats_say_also_with_an_error(folder, pool_of):  # noqa: F811
    """A model that says the turns of the chats gets their answers, and the best score."""
    tools = [f"{folder}/my_shop.py:{name}" for name in ("price", "add")]
    play = Play(function=f"{folder}/my_shop.py:right", signature="tools", tools=tools, max_tokens=256, workers=1)
    pool, expected = (
        pool_of(play.settings),
        {row["prompt"][0]["content"]: row for row in lines(folder / "shopping.jsonl")},
    )
    errors = 0
    for chat in (row["messages"] for row in lines(folder / "calls.jsonl")):
        turns = [turn for turn in chat if turn["role"] == "assistant"]
        called = [each["function"] for turn in turns for each in turn.get("tool_calls", [])]
        said = [*(call(each["name"], **each["arguments"]) for each in called), turns[-1]["content"]]
        end, answers = talk(pool, said, expected[chat[0]["content"]])
        told = [turn["content"] for turn in chat if turn["role"] == "tool"]
        assert [contents(answer) for answer in answers] == [[content] for content in told]
        failed = sum(content.startswith('{"error"') for content in told)
        assert (end.score, end.numbers["tool_errors"]) == (1 + 0.1 * (len(told) - failed), failed)
        errors += failed
    assert errors > 0


def test_the_pages_mcp_server_lists_goods_and_prices(folder, pool_of):  # noqa: F811
    pytest.importorskip("mcp.server.mcpserver")  # of mcp 2
    server = {"command": sys.executable, "args": ["my_server.py"], "cwd": str(folder)}
    play = Play(
        function=f"{folder}/my_tools.py:right",
        signature="mcp",
        arguments={"servers": {"shop": server}},
        max_tokens=256,
        workers=1,
    )
    turns = [call("price", item="plum"), call("price", item="fig"), "It is 4"]
    end, answers = talk(pool_of(play.settings), turns, {"prompt": "what is a plum", "ground_truth": "4"})
    assert [contents(answer) for answer in answers] == [["4"], ["no fig; there is apple, plum, pear"]]
    assert (end.score, end.numbers["tool_calls"]) == (1.0, 2.0)
