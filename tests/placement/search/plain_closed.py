"""The oracle for closed problem files: reads the JSON itself, schedules a printed plan as the format's text says."""

import gzip
import json
from pathlib import Path
from typing import Any


def read(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    return json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)


class Closed:
    """A file and a plan in the form of the last line that `solve_problem.py` prints."""

    def __init__(self, data: dict[str, Any], plan: dict[str, dict[str, int]]) -> None:
        self.data, self.plan = data, plan
        self.meshes = {mesh["id"]: mesh for mesh in data["meshes"]}
        self.calls = {call["name"]: call for call in data["calls"]}

    def strategy(self, call: str) -> dict[str, int]:
        """The one row of the file's table that the plan names; fails when there is none."""
        wanted = self.plan[call]
        (row,) = [
            s for s in self.data["strategies"][call] if all(s[axis] == wanted[axis] for axis in ("pp", "tp", "dp"))
        ]
        assert row["n_gpus"] == self.meshes[wanted["mesh"]]["n_gpus"]
        return row

    def devices(self, call: str) -> set[tuple[int, int]]:
        mesh = self.meshes[self.plan[call]["mesh"]]
        nodes = range(mesh["first_node"], mesh["first_node"] + mesh["n_nodes"])
        return {(node, mesh["first_gpu"] + gpu) for node in nodes for gpu in range(mesh["gpus_per_node"])}

    def fits(self) -> bool:
        everywhere = set().union(*(self.devices(call) for call in self.calls))
        for device in everywhere:
            rows = [self.strategy(call) for call in self.calls if device in self.devices(call)]
            largest = max(row["mem_bytes"] - row["static_bytes"] for row in rows)
            if sum(row["static_bytes"] for row in rows) + largest > self.data["device_mem_bytes"]:
                return False
        return True

    def move_us(self, size: int, source: str, target: str) -> int:
        degrees = [self.strategy(call)[axis] for call in (source, target) for axis in ("pp", "tp", "dp")]
        if degrees[:3] == degrees[3:]:
            return 0
        return self.data["realloc"]["table_us"].get(",".join(map(str, [size, *degrees])), 0)

    def makespan_us(self) -> int:
        nodes = self.unrolled()
        ended: dict[tuple, int] = {}
        placed: list[tuple[set, int]] = []
        while len(ended) < len(nodes):
            ready = [(max([0, *(ended[w] for w in waits)]), index, key) for index, (key, (_, _, waits)) in
                     enumerate(nodes.items()) if key not in ended and all(w in ended for w in waits)]  # fmt: skip
            at, _, key = min(ready)
            microseconds, where, _ = nodes[key]
            start = max([at, *(end for used, end in placed if used & where)])
            ended[key] = start + microseconds
            placed.append((where, ended[key]))
        return max(ended.values())

    def unrolled(self) -> dict[tuple, tuple[int, set, list[tuple]]]:
        """(iteration, name) -> microseconds, devices, what it waits for; in the order of the file."""
        nodes: dict[tuple, tuple[int, set, list[tuple]]] = {}
        for iteration in range(self.data["iterations"]):
            for name, call in self.calls.items():
                waits = [key for dep in call["deps"] for key in self.end(iteration, dep)]
                for source, target in self.data["cross_iteration_deps"]:
                    if target == name and iteration:
                        waits += self.end(iteration - 1, source)
                before = self.moves(iteration, name, before=True)
                nodes.update({key: (us, where, waits) for key, (us, where) in before.items()})
                nodes[iteration, name] = (self.strategy(name)["time_us"], self.devices(name), [*waits, *before])
                after = self.moves(iteration, name, before=False)
                nodes.update({key: (us, where, [(iteration, name)]) for key, (us, where) in after.items()})
        return nodes

    def end(self, iteration: int, name: str) -> list[tuple]:
        """What the successors of a call wait for."""
        return [(iteration, name), *self.moves(iteration, name, before=False)]

    def moves(self, iteration: int, train: str, before: bool) -> dict[tuple, tuple[int, set]]:
        moves = {}
        for hook in self.data["realloc"]["hooks"]:
            if hook["train"] == train:
                ends = (hook["other"], train) if before else (train, hook["other"])
                us = self.move_us(hook["size_key"], *ends)
                sides = [(hook["other"], 0), (train, 1)]
                moves |= {
                    (iteration, train, before, hook["other"], side): (us, self.devices(on)) for on, side in sides if us
                }
        return moves
