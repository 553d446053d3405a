"""Signature `mcp`: the tools of MCP servers; a function of yours scores the row.

A worker has a connection to each server, or each row has its own if the servers are stateful. A server that ends fails
the rows that call it then; the next row starts it again. A result that the server marks as an error is an answer.
"""

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import Any

from prefect_rlhf.engines.functions.load import reason
from prefect_rlhf.engines.functions.signatures.first_use import package
from prefect_rlhf.engines.functions.signatures.loaded import LoadedPlay, Model, PlayFailed
from prefect_rlhf.engines.functions.signatures.play_function import SERVERS, PlayFunction
from prefect_rlhf.engines.functions.signatures.tools import NamedTool, by_name, converse, scored, scoring
from prefect_rlhf.errors.errors import InvalidInput, UnknownKey

_START_SECONDS = 30.0
_KEYS = ("servers", "stateful")


class Connection:
    """A client of a server. A task of its own holds it, since MCP's clients end in the task that began them."""

    def __init__(self, name: str, server: Mapping[str, Any]) -> None:
        self.name, self._server = name, server
        self._end = asyncio.Event()
        self.client: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._hold())

    async def schemas(self) -> list[Mapping[str, Any]]:
        """Return the schemas of the server's tools. Raises PlayFailed if the server does not answer."""
        return [_schema(each) for each in (await self._answer(lambda client: client.list_tools())).tools]

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return the text of a tool's result. Raises PlayFailed if the server ends, and for a result without text."""
        result = await self._answer(lambda client: client.call_tool(name, dict(arguments)))
        texts = [each.text for each in result.content if getattr(each, "type", "") == "text"]
        if len(texts) < len(result.content):
            raise PlayFailed(f"tool {name} of MCP server {self.name} returned content that is no text")
        return "\n".join(texts)

    @property
    def has_ended(self) -> bool:
        """Whether it can answer no further call."""
        return self._end.is_set() or self._task.done()

    async def close(self) -> None:
        """End the client, and the server if it is a process."""
        self._end.set()
        with suppress(BaseException):
            await self._task

    async def _answer(self, ask: Any) -> Any:
        try:
            async with asyncio.timeout(_START_SECONDS):
                client = await asyncio.shield(self.client)
        except TimeoutError:
            raise PlayFailed(f"MCP server {self.name} did not start within {_START_SECONDS:g} s") from None
        except Exception as error:  # noqa: BLE001  a client's library may raise anything
            raise PlayFailed(f"MCP server {self.name} did not start: {reason(error, '')}") from None
        try:
            return await ask(client)
        except Exception as error:  # noqa: BLE001  as above
            self._end.set()
            raise PlayFailed(f"MCP server {self.name} gave no answer: {reason(error, '')}") from None

    async def _hold(self) -> None:
        try:
            async with AsyncExitStack() as stack:
                self.client.set_result(await _connected(stack, self._server))
                await self._end.wait()
        except BaseException as error:  # noqa: BLE001  as above
            if not self.client.done():
                self.client.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))
                self.client.exception()  # a play may read it, or none


class Servers:
    """The connections of a worker, or of a row."""

    def __init__(self, servers: Mapping[str, Mapping[str, Any]]) -> None:
        self._servers = servers
        self._open: dict[str, Connection] = {}

    async def schemas(self) -> Mapping[str, list[Mapping[str, Any]]]:
        """Return the schemas of all tools, by server."""
        return {name: await self._of(name).schemas() for name in self._servers}

    def tools(self, schemas: Mapping[str, list[Mapping[str, Any]]]) -> Mapping[str, NamedTool]:
        """Return the tools of all servers, called by these connections. Raises InvalidInput for two of one name."""
        return by_name(
            NamedTool(partial(self._call, name, schema["function"]["name"]), schema, "")
            for name, those in schemas.items()
            for schema in those
        )

    async def _call(self, server: str, tool: str, /, **arguments: Any) -> str:
        return await self._of(server).call(tool, arguments)

    async def close(self) -> None:
        """Close all connections."""
        for connection in self._open.values():
            await connection.close()

    def _of(self, name: str) -> Connection:
        if name not in self._open or self._open[name].has_ended:
            self._open[name] = Connection(name, self._servers[name])
        return self._open[name]


async def load_mcp(function: PlayFunction) -> LoadedPlay:
    """Connect to the servers, and list their tools. Raises InvalidInput for servers that do not answer."""
    score, place = scoring(function)
    keywords = function.keywords
    for key in keywords:
        if key not in _KEYS:
            raise UnknownKey(f"play.arguments.{key}", keywords[key], f"it has {', '.join(_KEYS)}")
    servers: Mapping[str, Mapping[str, Any]] = keywords["servers"]
    _check(servers)
    shared = Servers(servers)
    try:
        schemas = await shared.schemas()
    except PlayFailed as failed:
        raise InvalidInput("play.arguments.servers", ", ".join(servers), f"servers that answer: {failed}") from None

    async def play(row: Mapping[str, Any], say: Model) -> object:
        used = Servers(servers) if keywords.get("stateful") else shared
        try:
            said = await converse(say, used.tools(schemas), function.tool_format)
        finally:
            if used is not shared:
                await used.close()
        return await scored(score, place, row, said)

    return LoadedPlay(play, place, [tool.schema for tool in shared.tools(schemas).values()])


def _check(servers: object) -> None:
    """Raise InvalidInput for servers of another form, and without the package `mcp`."""
    if not isinstance(servers, dict) or not all(isinstance(each, dict) for each in servers.values()):
        raise InvalidInput("play.arguments.servers", type(servers).__name__, SERVERS)
    for name, server in servers.items():
        if ("command" in server) == ("url" in server) or set(server) - {"command", "args", "env", "cwd", "url"}:
            keys = ", ".join(map(str, server))  # not the values: variables may be secrets
            raise InvalidInput(f"play.arguments.servers.{name}", keys, "a command (and args, env, cwd), or a url")
    package("mcp", "the package mcp")


async def _connected(stack: AsyncExitStack, server: Mapping[str, Any]) -> Any:
    """Return a client: of mcp 2 by its `Client`, of mcp 1 by a session over a transport."""
    import mcp

    where = server.get("url") or mcp.StdioServerParameters(**server)
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


def _schema(tool: Any) -> Mapping[str, Any]:
    """Return the schema of a server's tool as chat templates show it."""
    parameters = getattr(tool, "input_schema", None) or getattr(tool, "inputSchema", None) or {}
    described = {"name": tool.name, "description": tool.description or "", "parameters": parameters}
    return {"type": "function", "function": described}
