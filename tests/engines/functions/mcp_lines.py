"""An MCP server of lines of JSON on standard input and output, whose argument is the case that it is for.

A call with the argument `slow` is answered once the server gets the signal SIGUSR1.
"""

import json
import os
import signal
import sys
import time

CASE = sys.argv[1]
ANY = {"type": "object", "properties": {}, "additionalProperties": True}
NAMES = ("pid", "error", "bad_arguments", "die", "wait", "odd", "stranger", "garble")
TOOLS = [{"name": name, "inputSchema": ANY} for name in NAMES]


def tools(params):
    """One tool a page; without tools in the case `empty`."""
    page = int((params or {}).get("cursor") or 0)
    if CASE == "empty":
        return {"tools": []}
    return {"tools": [TOOLS[page]]} | ({"nextCursor": str(page + 1)} if page + 1 < len(TOOLS) else {})


def call(name, arguments):
    if name == "die":
        os._exit(3)
    if name == "error":
        return {"error": {"code": -32050, "message": "the index is locked"}}
    if name == "bad_arguments":
        return {"error": {"code": -32602, "message": "word is missing"}}
    if name == "wait":
        time.sleep(60)
    if name == "odd":
        return {"result": {"content": 3}}
    if name == "stranger":
        return {"result": {"content": [{"type": "text", "text": "for nobody"}]}}
    text = f"{os.getpid()} {json.dumps(arguments)}"
    return {"result": {"content": [{"type": "text", "text": text}]}}


def answer(request):
    method, params = request["method"], request.get("params") or {}
    if method == "initialize":
        if CASE == "deaf":
            time.sleep(600)
        if CASE == "dies":
            sys.exit(3)
        if CASE == "errs":
            return {"error": {"code": -32603, "message": f"{os.environ['NOTES_TOKEN']} is no key"}}
        if CASE == "odd":
            return {"result": {"capabilities": 3}}
        about = {"name": "lines", "version": "1"}
        version = params["protocolVersion"]
        return {"result": {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": about}}
    if method == "tools/list":
        if CASE == "no listing":
            time.sleep(600)
        if CASE == "no method":
            return {"error": {"code": -32601, "message": "Method not found"}}
        return {"result": tools(params)}
    if method == "tools/call":
        return call(params["name"], params.get("arguments"))
    return {"error": {"code": -32601, "message": "Method not found"}}


def write_answer(request):
    made = {"jsonrpc": "2.0", "id": request["id"], **answer(request)}
    tool = (request.get("params") or {}).get("name")
    if tool == "stranger":
        made["id"] = 10**6
    sys.stdout.write("{" * (tool == "garble") + json.dumps(made) + "\n")
    sys.stdout.flush()


def is_slow(request):
    return bool(((request.get("params") or {}).get("arguments") or {}).get("slow"))


slow = []
signal.signal(signal.SIGUSR1, lambda *_: [write_answer(slow.pop(0)) for _ in tuple(slow)])
if CASE == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
for line in sys.stdin:
    request = json.loads(line)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})  # else two answers would be written at once
    if "id" in request and "method" in request:
        slow.append(request) if is_slow(request) else write_answer(request)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
