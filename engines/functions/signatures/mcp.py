"""Signature `mcp`: the tools of MCP servers; your function scores the row.

A worker has a connection to each server; if the servers are stateful, each row has its own. If a server ends or does
not answer in time, the rows that are calling it fail, and the next row starts it again. A result that the server marks
as an error is an answer, and so is a refusal of a call's arguments. An error response to a call is an answer too,
unless `tool_errors` is `fail`.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from prefect_rlhf.engines.functions.signatures.error_texts import for_the_model, hiding, in_a_line
from prefect_rlhf.engines.functions.signatures.first_use import package
from prefect_rlhf.engines.functions.signatures.loaded import LoadedPlay, Model, PlayFailed
from prefect_rlhf.engines.functions.signatures.play_function import SERVERS, PlayFunction
from prefect_rlhf.engines.functions.signatures.tools import (
    BadResult,
    NamedTool,
    by_name,
    converse,
    scored,
    scoring,
)
from prefect_rlhf.errors.errors import InvalidInput

_END_SECONDS = 10.0
_BAD_ARGUMENTS, _NO_METHOD = -32602, -32601
_OF_LOST = (-32000, -32600, 32600)
"""Codes of a connection that was closed, and of a session that the server has ended."""


class BadArguments(Exception):  # noqa: N818  an answer for the model, not an error of ours
    """A server refuses a call's arguments; the text is the server's."""


class Connection:
    """A client of a server. It runs in a task of its own, because MCP's clients must end in the task that started
    them.
    """

    def __init__(
        self, name: str, server: Mapping[str, Any], start_seconds: float, write: Callable[[BaseException | str], str]
    ) -> None:
        """`write` describes an error without secrets."""
        self.name, self._server, self._write = name, server, write
        self._end, self._calls, self._is_lost = asyncio.Event(), 0, False
        loop = asyncio.get_running_loop()
        self._client: asyncio.Future[Any] = loop.create_future()
        self._task = asyncio.create_task(self._hold())
        starts, self._list_seconds = start_seconds / 2, 0.75 * start_seconds  # at the whole, the pool ends the worker
        loop.call_later(starts, self._give_up, f"did not start within {starts:g} s, half of play.start_seconds")

    async def schemas(self) -> list[Mapping[str, Any]]:
        """Return the schemas of the server's tools. Raises PlayFailed if the server does not answer in time."""
        try:
            async with asyncio.timeout(self._list_seconds):
                return [_schema(tool) for tool in await self._answer(f"MCP server {self.name}", _listed)]
        except TimeoutError:
            why = f"did not list its tools within {self._list_seconds:g} s, three quarters of play.start_seconds"
            raise PlayFailed(f"MCP server {self.name} {why}") from None

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return the text of a tool's result.

        Raises PlayFailed if the server returns no result, or a result without text, and BadArguments if it refuses the
        arguments. The error has a cause if the server is not lost.
        """
        of = named(name, self.name)
        result = await self._answer(of, lambda client: client.call_tool(name, dict(arguments)))
        texts = [each.text for each in result.content if getattr(each, "type", "") == "text"]
        if len(texts) < len(result.content):
            why = f"{of} returned content that is no text"
            raise PlayFailed(why) from BadResult(why)
        return "\n".join(texts)

    @property
    def has_ended(self) -> bool:
        """Whether further calls need another connection."""
        return self._is_lost or self._task.done()

    def close(self) -> None:
        """End the client, and the server if it is a process, without waiting, because a server may be slow to end."""
        self._is_lost = True
        self._give_up("was closed")
        self._end.set()
        asyncio.get_running_loop().call_later(_END_SECONDS, self._task.cancel)

    async def _answer(self, of: str, ask: Callable[[Any], Awaitable[Any]]) -> Any:
        client = await asyncio.shield(self._client)
        self._calls += 1
        try:
            return await self._unless_it_ends(ask(client))
        except asyncio.CancelledError:  # the play was too slow: this server may hang
            self._is_lost = True
            raise
        except Exception as error:  # noqa: BLE001  a client's library may raise anything
            code = _code(error)
            if code == _BAD_ARGUMENTS:
                raise BadArguments(self._write(str(error))) from None
            is_end = code is None or code in _OF_LOST
            self._is_lost = self._is_lost or is_end
            kind = "gave no answer" if is_end else "answered with an error"
            raise PlayFailed(f"{of} {kind}: {self._write(error)}") from (None if is_end else error)
        finally:
            self._calls -= 1
            if self._is_lost and not self._calls:  # the calls of other rows may still get their answers
                self.close()

    async def _unless_it_ends(self, asked: Awaitable[Any]) -> Any:
        """Return an answer. Raises ConnectionError if the client ends first: mcp 1 leaves its calls without an end."""
        answer = asyncio.ensure_future(asked)
        try:
            await asyncio.wait({answer, self._task}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise ConnectionError("the connection ended")
            return answer.result()
        finally:
            answer.cancel()

    async def _hold(self) -> None:
        try:
            async with AsyncExitStack() as stack:
                client = await _connected(stack, self._server)
                if not self._client.done():
                    self._client.set_result(client)
                    await self._end.wait()
        except BaseException as error:  # noqa: BLE001  as above
            self._give_up(f"did not start: {self._write(error)}")

    def _give_up(self, why: str) -> None:
        """Fail a start that is not done."""
        if not self._client.done():
            self._is_lost = True
            self._client.set_exception(PlayFailed(f"MCP server {self.name} {why}"))
            self._client.exception()  # perhaps no play reads it
            self._task.cancel()


class Servers:
    """The connections for a worker, or for a row."""

    def __init__(
        self,
        servers: Mapping[str, Mapping[str, Any]],
        start_seconds: float,
        write: Callable[[BaseException | str], str] = in_a_line,
        tell: Callable[[BaseException], str] | None = None,
    ) -> None:
        self._servers, self._start_seconds, self._write, self._tell = servers, start_seconds, write, tell
        self._open: dict[str, Connection] = {}

    async def schemas(self) -> Mapping[str, list[Mapping[str, Any]]]:
        """Return the schemas of all tools by server."""
        of_each = await asyncio.gather(*(self._of(name).schemas() for name in self._servers))
        return dict(zip(self._servers, of_each, strict=True))

    def tools(self, schemas: Mapping[str, list[Mapping[str, Any]]]) -> Mapping[str, NamedTool]:
        """Return all servers' tools, called through these connections. Raises InvalidInput for two tools of the same
        name.
        """
        return by_name(
            NamedTool(
                call=partial(self._call, name, tool := schema["function"]["name"]),
                schema=schema,
                place=named(tool, name),
                tell=self._tell,
                refusals=(BadArguments,),
            )
            for name, those in schemas.items()
            for schema in those
        )

    async def _call(self, server: str, tool: str, /, **arguments: Any) -> str:
        return await self._of(server).call(tool, arguments)

    def close(self) -> None:
        """Close all connections."""
        for connection in self._open.values():
            connection.close()

    def _of(self, name: str) -> Connection:
        if name not in self._open or self._open[name].has_ended:
            self._open[name] = Connection(name, self._servers[name], self._start_seconds, self._write)
        return self._open[name]


async def load_mcp(function: PlayFunction) -> LoadedPlay:
    """Connect to the servers and list their tools. Raises InvalidInput for servers without an answer or a tool."""
    score, place = scoring(function)
    keywords = function.keywords
    servers: Mapping[str, Mapping[str, Any]] = keywords["servers"]
    _check(servers)
    write, tell = hiding(function), for_the_model(function)
    seconds = function.start_seconds
    shared = Servers(servers, seconds, write, tell)
    try:
        schemas = await shared.schemas()
    except PlayFailed as failed:
        raise InvalidInput("play.arguments.servers", ", ".join(servers), f"servers that answer: {failed}") from None
    for name, those in schemas.items():
        if not those:
            raise InvalidInput(f"play.arguments.servers.{name}", "a server without tools", "a server with tools")

    async def play(row: Mapping[str, Any], say: Model) -> object:
        used = Servers(servers, seconds, write, tell) if keywords.get("stateful") else shared
        try:
            said = await converse(say, used.tools(schemas), function.tool_format)
        finally:
            if used is not shared:
                used.close()
        return await scored(score, place, row, said)

    return LoadedPlay(play, place, [tool.schema for tool in shared.tools(schemas).values()])


def named(tool: str, server: str) -> str:
    """Return the name of a server's tool for errors."""
    return f"tool {tool} of MCP server {server}"


def _check(servers: object) -> None:
    """Raise InvalidInput for servers of another form, and without the package `mcp`."""
    if not isinstance(servers, dict) or not all(isinstance(each, dict) for each in servers.values()):
        raise InvalidInput("play.arguments.servers", type(servers).__name__, SERVERS)
    for name, server in servers.items():
        allowed = {"command", "args", "env", "cwd"} if "command" in server else {"url"}
        if not {"command", "url"} & set(server) or set(server) - allowed:
            keys = ", ".join(map(str, server))  # not the values: variables may be secrets
            raise InvalidInput(f"play.arguments.servers.{name}", keys, "a command (and args, env, cwd), or a url alone")
    package("mcp", "the package mcp")


async def _connected(stack: AsyncExitStack, server: Mapping[str, Any]) -> Any:
    """Return a client: of mcp 2 by its `Client`, of mcp 1 by a session over a transport."""
    import mcp

    where = server.get("url") or mcp.StdioServerParameters(**_with_environment(server))
    if hasattr(mcp, "Client"):
        return await stack.enter_async_context(mcp.Client(where))
    if isinstance(where, str):
        from mcp.client.streamable_http import streamablehttp_client as transport
    else:
        from mcp.client.stdio import stdio_client as transport
    reads, writes, *_ = await stack.enter_async_context(transport(where))
    session = await stack.enter_async_context(mcp.ClientSession(reads, writes))
    await session.initialize()
    return session


def _with_environment(server: Mapping[str, Any]) -> dict[str, Any]:
    """Return a server with this worker's variables besides its own; MCP's clients pass only a few on."""
    own = server.get("env")
    return {**server, "env": {**os.environ, **(own or {})} if own is None or isinstance(own, dict) else own}


async def _listed(client: Any) -> list[Any]:
    """Return all tools that a server lists, on every page."""
    tools: list[Any] = []
    cursor: str | None = None
    while True:
        try:
            page = await client.list_tools(cursor=cursor)
        except Exception as error:
            if _code(error) == _NO_METHOD:  # a server of resources or prompts alone
                return []
            raise
        tools += page.tools
        cursor = getattr(page, "next_cursor", None) or getattr(page, "nextCursor", None)
        if cursor is None:
            return tools


def _code(error: Exception) -> int | None:
    """Return the code of an error that MCP defines; None for any other error."""
    code = getattr(getattr(error, "error", None), "code", None)
    return code if isinstance(code, int) else None


def _schema(tool: Any) -> Mapping[str, Any]:
    """Return the schema of a server's tool as chat templates show it."""
    parameters = getattr(tool, "input_schema", None) or getattr(tool, "inputSchema", None) or {}
    described = {"name": tool.name, "description": tool.description or "", "parameters": parameters}
    return {"type": "function", "function": described}
