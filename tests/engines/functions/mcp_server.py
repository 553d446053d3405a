"""An MCP server on standard input and output, with the package mcp 1 or 2."""

import os

try:
    from mcp.server.mcpserver import MCPServer as Server
except ImportError:
    from mcp.server.fastmcp import FastMCP as Server

server = Server("numbers")
STATE = {"calls": 0}


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def count() -> int:
    """Count the calls."""
    STATE["calls"] += 1
    return STATE["calls"]


@server.tool()
def refuse() -> str:
    """Raise an error."""
    raise ValueError("not today")


@server.tool()
def die() -> str:
    """End the server."""
    os._exit(3)


server.run()
