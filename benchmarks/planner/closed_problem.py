"""Closed planning problems (JSON, or gzipped JSON): costs are given, so they test the search alone.

Around each `train` call of a hook the model moves there and back: before it a node on each of the two meshes, after it
again one on each.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from benchmarks.planner.move_table import moves_between
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.devices.strategy import Strategy
from prefect_rlhf.placement.search.compiled import Ints
from prefect_rlhf.placement.search.problem import (
    Edge,
    Interval,
    Occupies,
    Option,
    PairNode,
    Plan,
    PlannedCall,
    Problem,
    ProblemNode,
)

JsonObject = Mapping[str, Any]
READ = {
    "name",
    "n_nodes",
    "gpus_per_node",
    "device_mem_bytes",
    "iterations",
    "calls",
    "cross_iteration_deps",
    "meshes",
    "strategies",
    "realloc",
    "transfer",
    "offload",
}
"""The keys that decide something."""
DESCRIPTIVE = {"problem", "semantics", "option_rule", "hardware_of_analytic_model", "build_stats"}
"""The keys that say where a file comes from."""
JSON_NAMES: Mapping[type, str] = {int: "integer", str: "string", list: "array", dict: "object"}


@dataclass(frozen=True, slots=True)
class Hook:
    """Weights of one model move from `other`'s layout to `train`'s before `train`, and back after it."""

    train: str
    other: str
    size_key: int


@dataclass(frozen=True, slots=True)
class ClosedProblem:
    """A problem with the names that its file has for meshes, and the keys of the file that say nothing about it."""

    problem: Problem
    mesh_ids: tuple[int, ...]
    not_read: tuple[str, ...]

    def plan_in_file(self, plan: Plan) -> dict[str, dict[str, int]]:
        """Call -> {mesh, pp, tp, dp}, with the file's `id` of the mesh."""
        options = {call.name: call.options for call in self.problem.calls}
        placements = {}
        for name, choice in plan.items():
            strategy = options[name][choice.option].strategy
            degrees = {"pp": strategy.pp, "tp": strategy.tp, "dp": strategy.dp}
            placements[name] = {"mesh": self.mesh_ids[choice.mesh], **degrees}
        return placements


def load_closed_problem(path: Path) -> ClosedProblem:
    """Read the problem in `path`. Raises InvalidInput when the file is missing or is no such problem."""
    return read_closed_problem(read_json(path, "FILE"), name=path.name)


def read_json(path: Path, field: str) -> Any:
    """Parse the file. Raises InvalidInput of `field` where it cannot be read, or is no JSON."""
    try:
        content = path.read_bytes()
        return orjson.loads(gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content)
    except (ValueError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InvalidInput(field, str(path), f"JSON, or gzipped JSON ({error})") from error
    except OSError as error:
        raise InvalidInput(field, str(path), f"a file of JSON ({error.strerror or error})") from error


def read_closed_problem(data: Any, name: str = "problem") -> ClosedProblem:
    """Make a problem of parsed JSON. Raises InvalidInput."""
    if not isinstance(data, dict):
        raise InvalidInput(name, type(data).__name__, "a JSON object with calls, meshes and strategies")
    for unsupported in ("transfer", "offload"):
        if data.get(unsupported):
            raise InvalidInput(unsupported, "costs", "no such costs: closed problems only price reallocation")
    meshes = _meshes(data)
    sizes = sorted({mesh.num_devices for mesh in meshes})
    calls = _calls(data, sizes)
    hooks = _hooks(data, calls)
    problem = Problem(
        name=str(data.get("name", name)),
        device_bytes=(_count(data, "device_mem_bytes"),) * (_count(data, "n_nodes") * _count(data, "gpus_per_node")),
        meshes=meshes,
        mesh_classes=tuple(tuple(i for i, mesh in enumerate(meshes) if mesh.num_devices == size) for size in sizes),
        nodes=tuple(_nodes(calls, list(_moves_of(data, calls, hooks)))),
        edges=tuple(_edges(data, calls, hooks)),
        iterations=_count(data, "iterations"),
    )
    ids = tuple(mesh["id"] for mesh in data["meshes"])
    return ClosedProblem(problem, ids, tuple(key for key in data if key not in READ | DESCRIPTIVE))


def _get(data: Any, key: str, json_type: type, where: str = "") -> Any:
    value = data.get(key) if isinstance(data, dict) else None
    if not isinstance(value, json_type) or isinstance(value, bool):
        raise InvalidInput(f"{where}{key}", value, f"a value of JSON type {JSON_NAMES[json_type]}")
    return value


def _count(data: JsonObject, key: str, where: str = "", least: int = 1) -> int:
    value: int = _get(data, key, int, where)
    if value < least:
        raise InvalidInput(f"{where}{key}", value, f"{least} or more")
    return value


def _meshes(data: JsonObject) -> tuple[Interval, ...]:
    per_node = _count(data, "gpus_per_node")
    meshes = tuple(_mesh(mesh, per_node, f"meshes[{i}].") for i, mesh in enumerate(_get(data, "meshes", list)))
    ids = [mesh["id"] for mesh in data["meshes"]]
    if not meshes or len(set(ids)) < len(ids):
        raise InvalidInput("meshes", sorted(ids), "one or more meshes, each with an id of its own")
    return meshes


def _mesh(mesh: Any, per_node: int, where: str) -> Interval:
    _get(mesh, "id", int, where)
    num_nodes, width = _count(mesh, "n_nodes", where), _count(mesh, "gpus_per_node", where)
    if num_nodes > 1 and width != per_node:
        raise InvalidInput(f"{where}gpus_per_node", width, f"{per_node}: a mesh of several nodes has all their devices")
    if _count(mesh, "n_gpus", where) != num_nodes * width:
        raise InvalidInput(f"{where}n_gpus", mesh["n_gpus"], f"n_nodes * gpus_per_node = {num_nodes * width}")
    start = _count(mesh, "first_node", where, 0) * per_node + _count(mesh, "first_gpu", where, 0)
    return Interval(start, start + num_nodes * width, str(mesh.get("name", mesh["id"])))


def _calls(data: JsonObject, sizes: Sequence[int]) -> tuple[PlannedCall, ...]:
    strategies = _get(data, "strategies", dict)
    calls: list[PlannedCall] = []
    for index, call in enumerate(_get(data, "calls", list)):
        where = f"calls[{index}]."
        name = _get(call, "name", str, where)
        if name in (earlier.name for earlier in calls):
            raise InvalidInput(f"{where}name", name, "a name that no call before it has")
        rows = _get(strategies, name, list, "strategies.")
        options = [_option(row, sizes, f"strategies.{name}[{i}].") for i, row in enumerate(rows)]
        possible = tuple(option for option in options if option is not None)
        if not possible:
            raise InvalidInput(f"strategies.{name}", len(rows), "a strategy for the size of some mesh")
        calls.append(PlannedCall(name, _get(call, "role", str, where), _get(call, "type", str, where), possible))
    if not calls:
        raise InvalidInput("calls", [], "at least one call")
    return tuple(calls)


def _option(row: Any, sizes: Sequence[int], where: str) -> Option | None:
    """Read an option; None for a strategy that no mesh has the size for, which is no option of any plan."""
    strategy = Strategy(*(_count(row, axis, where) for axis in ("dp", "tp", "pp")))
    size = _count(row, "n_gpus", where)
    if strategy.num_devices != size:
        raise InvalidInput(f"{where}n_gpus", size, f"pp * tp * dp = {strategy.num_devices}")
    microseconds, static = _count(row, "time_us", where), _count(row, "static_bytes", where, 0)
    peak = _count(row, "mem_bytes", where, 0)
    return Option(strategy, sizes.index(size), microseconds, static, max(peak, static)) if size in sizes else None


def _hooks(data: JsonObject, calls: Sequence[PlannedCall]) -> tuple[Hook, ...]:
    realloc = data.get("realloc", {"hooks": []})
    names = [call.name for call in calls]
    hooks = []
    for index, hook in enumerate(_get(realloc, "hooks", list, "realloc.")):
        where = f"realloc.hooks[{index}]."
        train, other = (_call_name(_get(hook, key, str, where), names, f"{where}{key}") for key in ("train", "other"))
        if train == other:
            raise InvalidInput(f"{where}other", other, "another call than train")
        hooks.append(Hook(train, other, _get(hook, "size_key", int, where)))
    return tuple(hooks)


def _call_name(name: str, names: Sequence[str], where: str) -> str:
    if name not in names:
        raise InvalidInput(where, name, f"one of the calls {', '.join(names)}")
    return name


def _moves_of(
    data: JsonObject, calls: Sequence[PlannedCall], hooks: Sequence[Hook]
) -> Iterator[tuple[Hook, Ints, Ints]]:
    """Yield each hook with the microseconds of its moves there and back, both as [option of other, option of train]."""
    realloc = data.get("realloc", {})
    table = _get(realloc, "table_us", dict, "realloc.") if realloc else {}
    strategies = {call.name: [option.strategy for option in call.options] for call in calls}
    of_size: dict[int, list[Strategy]] = {hook.size_key: [] for hook in hooks}
    for hook in hooks:
        of_size[hook.size_key] += [*strategies[hook.train], *strategies[hook.other]]
    moves = moves_between(table, of_size)
    for hook in hooks:
        ends = strategies[hook.other], strategies[hook.train]
        yield hook, moves[hook.size_key].between(*ends), moves[hook.size_key].between(*ends[::-1]).T


def _nodes(calls: Sequence[PlannedCall], moves: Sequence[tuple[Hook, Ints, Ints]]) -> Iterator[ProblemNode]:
    for call in calls:
        around = [(hook, there, back) for hook, there, back in moves if hook.train == call.name]
        yield from (node for hook, there, _ in around for node in _moves("before", hook, there))
        yield call
        yield from (node for hook, _, back in around for node in _moves("after", hook, back))


def _moves(when: str, hook: Hook, durations: Ints) -> Iterator[PairNode]:
    """Yield the two nodes of one move; `durations[option of other, option of train]`."""
    sides: tuple[tuple[Occupies, str], ...] = (("first", hook.other), ("second", hook.train))
    for occupies, on in sides:
        yield PairNode(_move_name(when, hook, on), hook.other, hook.train, occupies, durations)


def _move_name(when: str, hook: Hook, on: str) -> str:
    return f"reallocate {when} {hook.train} ({hook.other}), on {on}"


def _edges(data: JsonObject, calls: Sequence[PlannedCall], hooks: Sequence[Hook]) -> Iterator[Edge]:
    """Yield all edges: moves before a call inherit its predecessors, its successors wait for the moves after it."""
    before: dict[str, list[str]] = {call.name: [] for call in calls}
    after: dict[str, list[str]] = {call.name: [] for call in calls}
    for hook in hooks:
        for on in (hook.other, hook.train):
            before[hook.train].append(_move_name("before", hook, on))
            after[hook.train].append(_move_name("after", hook, on))
    for call in calls:
        yield from (Edge(move, call.name) for move in before[call.name])
        yield from (Edge(call.name, move) for move in after[call.name])
    for source, target, lag in _dependencies(data, [call.name for call in calls]):
        starts = (source, *after[source])
        ends = (target, *before[target])
        yield from (Edge(start, end, lag) for start in starts for end in ends)


def _dependencies(data: JsonObject, names: Sequence[str]) -> Iterator[tuple[str, str, int]]:
    for index, call in enumerate(data["calls"]):
        where = f"calls[{index}].deps"
        for source in _get(call, "deps", list, f"calls[{index}]."):
            yield _call_name(source, names[:index], where), call["name"], 0
    for index, pair in enumerate(_get(data, "cross_iteration_deps", list)):
        where = f"cross_iteration_deps[{index}]"
        if not isinstance(pair, list) or len(pair) != 2:
            raise InvalidInput(where, pair, "[source, target]")
        yield _call_name(pair[0], names, where), _call_name(pair[1], names, where), 1
