"""A stand-in of the Hugging Face Hub on this machine, which answers what the real client of `huggingface_hub` asks.

Its repositories are folders. A new commit of a repository keeps the files of the earlier ones.
"""

from __future__ import annotations

import hashlib
import json
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

LARGE = 4096  # bytes: from here on a file is one of LFS, with the hash of its content as its name in the cache


@dataclass
class Repository:
    """The files of each commit, the branches, and who may read."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    gated: bool = False
    private: bool = False

    def commit_of(self, revision: str) -> str | None:
        """Return the commit of a branch, of a commit, or of the beginning of a commit's name."""
        named = self.branches.get(revision)
        return named or next((commit for commit in self.commits if commit.startswith(revision)), None)


@dataclass
class Hub:
    """The state of the stand-in: tests change it, and read the requests that it has answered."""

    address: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)  # by name; datasets begin with datasets/
    tokens: set[str] = field(default_factory=lambda: {"hf_right"})
    requests: list[str] = field(default_factory=list)  # method and path
    seen_tokens: set[str] = field(default_factory=set)
    cut_after: dict[str, int] = field(default_factory=dict)  # by file: bytes after which the connection breaks
    silent: set[str] = field(default_factory=set)  # beginnings of paths that are never answered
    status: int | None = None  # of every answer
    nonsense: bytes | None = None  # the content of every answer
    released: threading.Event = field(default_factory=threading.Event)

    def add(self, name: str, files: Mapping[str, bytes] | Path, branch: str = "main", **options: bool) -> str:
        """Add a commit to a branch of a repository; return the commit."""
        content = files if isinstance(files, Mapping) else _content(files)
        repository = self.repositories.setdefault(name, Repository(**options))
        seed = f"{name} {len(repository.commits)}".encode()
        commit = hashlib.sha1(seed, usedforsecurity=False).hexdigest()
        repository.commits[commit] = {".gitattributes": b"*.safetensors filter=lfs\n", **content}
        repository.branches[branch] = commit
        return commit

    def asked_for(self, method: str, part: str) -> list[str]:
        """Return the requests of a method whose path contains a part."""
        return [one for one in self.requests if one.startswith(f"{method} ") and part in one]


@contextmanager
def stand_in() -> Iterator[Hub]:
    """Answer requests at the address of the yielded hub while the body runs."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hub
    finally:
        hub.released.set()
        server.shutdown()
        server.server_close()
        thread.join()


def variables(hub: Hub, home: Path, **more: str) -> dict[str, str]:
    """Return the environment variables of a process that asks the stand-in, with an empty cache below `home`."""
    own = {"HF_ENDPOINT": hub.address, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    return {**own, "RLHF_HUB_OFFLINE": "0", **more}


@contextmanager
def in_this_process(hub: Hub, home: Path) -> Iterator[None]:
    """Let this process ask the stand-in while the body runs: `huggingface_hub` read its variables at its import."""
    from huggingface_hub import close_session, constants

    own = {"ENDPOINT": hub.address, "HF_HUB_CACHE": str(home / "hub"), "HF_HUB_OFFLINE": False}
    own |= {"HUGGINGFACE_CO_URL_TEMPLATE": hub.address + "/{repo_id}/resolve/{revision}/{filename}"}
    own |= {"HF_HUB_DISABLE_XET": True, "HF_TOKEN_PATH": str(home / "token")}
    with pytest.MonkeyPatch.context() as patched:
        for name, value in own.items():
            patched.setattr(constants, name, value)
        for name, value in variables(hub, home).items():
            patched.setenv(name, value)
        patched.delenv("HF_TOKEN", raising=False)
        close_session()
        yield
    close_session()


def _content(folder: Path) -> dict[str, bytes]:
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def _hash(content: bytes) -> str:
    if len(content) >= LARGE:
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        if any(path.startswith(beginning) for beginning in self.hub.silent):
            self.hub.released.wait()
            self.close_connection = True
            return
        if self.hub.status is not None:
            self._refuse(self.hub.status, None)
            return
        if self.hub.nonsense is not None and "agent" not in path:  # huggingface_hub keeps that answer
            self._send(self.hub.nonsense)
            return
        parts = path.strip("/").split("/")
        if parts[0] == "api" and len(parts) > 3:
            prefix = "" if parts[1] == "models" else f"{parts[1]}/"
            self._repository(f"{prefix}{parts[2]}/{parts[3]}", parts[4:])
        elif "resolve" in parts:
            at = parts.index("resolve")
            self._repository("/".join(parts[:at]), parts[at:])
        else:
            self._refuse(404, None)

    def _repository(self, name: str, rest: list[str]) -> None:
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token:
            self.hub.seen_tokens.add(token)
        repository = self.hub.repositories.get(name)
        is_known = token in self.hub.tokens
        if token and not is_known:
            self._refuse(401, None, "Invalid credentials in Authorization header")
            return
        if repository is None or repository.private and not is_known:
            self._refuse(404 if is_known else 401, "RepoNotFound")
            return
        action, *rest = rest or ["revision"]
        revision, rest = _revision(rest)
        commit = repository.commit_of(revision)
        if commit is None:
            self._refuse(404, "RevisionNotFound")
            return
        files = repository.commits[commit]
        if action == "revision":
            self._send_json({"id": name.removeprefix("datasets/"), "sha": commit, "siblings": []})
        elif action == "tree":
            self._send_json([_entry(path, content) for path, content in files.items()])
        elif repository.gated and not is_known:
            self._refuse(401, "GatedRepo")
        elif (path := "/".join(rest)) in files:
            self._send_file(path, files[path], commit)
        else:
            self._refuse(404, "EntryNotFound", headers={"X-Repo-Commit": commit})

    def _send_json(self, value: object) -> None:
        self._send(json.dumps(value).encode())

    def _send(self, content: bytes) -> None:
        self._headers(200, {"Content-Type": "application/json", "Content-Length": str(len(content))})
        if self.command == "GET":
            self.wfile.write(content)

    def _send_file(self, path: str, content: bytes, commit: str) -> None:
        wanted, own = self.headers.get("Range"), {"X-Repo-Commit": commit, "ETag": f'"{_hash(content)}"'}
        own |= {"Accept-Ranges": "bytes"}
        if len(content) >= LARGE:
            own |= {"X-Linked-Size": str(len(content)), "X-Linked-Etag": f'"{_hash(content)}"'}
        first, status = 0, 200
        if wanted is not None:
            first, status = int(wanted.removeprefix("bytes=").partition("-")[0]), 206
            own |= {"Content-Range": f"bytes {first}-{len(content) - 1}/{len(content)}"}
        self._headers(status, own | {"Content-Length": str(len(content) - first)})
        if self.command != "GET":
            return
        end = self.hub.cut_after.get(path)
        self.wfile.write(content[first:end])
        if end is not None:
            self.wfile.flush()
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)

    def _refuse(
        self, status: int, code: str | None, message: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        own = {"Content-Length": "0", **(headers or {})}
        own |= {"X-Error-Code": code} if code else {}
        own |= {"X-Error-Message": message} if message else {}
        self._headers(status, own)

    def _headers(self, status: int, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()


def _revision(rest: list[str]) -> tuple[str, list[str]]:
    if rest[:1] == ["refs"]:
        return "/".join(rest[:3]), rest[3:]
    return (rest[0], rest[1:]) if rest else ("main", [])


def _entry(path: str, content: bytes) -> dict[str, object]:
    entry: dict[str, object] = {"type": "file", "path": path, "size": len(content), "oid": _hash(content)}
    if len(content) >= LARGE:
        entry["lfs"] = {"oid": _hash(content), "size": len(content), "pointerSize": 134}
    return entry
