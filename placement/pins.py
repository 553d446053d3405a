"""Calls that a person wants on certain devices: the rest of the plan is searched around them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from prefect_rlhf.placement.candidates import Candidates, Setting
from prefect_rlhf.placement.errors import InvalidInput
from prefect_rlhf.placement.mesh import DeviceMesh


def pinned(setting: Setting, found: Candidates, meshes: Mapping[str, DeviceMesh]) -> tuple[Setting, Candidates]:
    """The candidates without those of the calls in `meshes` on any other mesh, which has a class of its own then.

    Raises InvalidInput for an unknown call, a mesh that the lease does not have, and one that a call does not fit.
    """
    line, kept = setting.line, dict(found)
    for name, mesh in meshes.items():
        if name not in found:
            raise InvalidInput(f"pins.{name}", mesh.name, f"a call with a model: {', '.join(found)}")
        if mesh not in line.meshes:
            raise InvalidInput(f"pins.{name}", mesh.name, "a mesh of the lease: some of its nodes, or a part of one")
        index, own = line.meshes.index(mesh), len(line.classes)
        here = [one for one in found[name] if index in line.classes[one.mesh_class]]
        if not here:
            raise InvalidInput(f"pins.{name}", mesh.name, "a mesh that divides its work and on which it fits")
        kept[name] = tuple(replace(one, mesh_class=own) for one in here)
        line = replace(line, classes=(*line.classes, (index,)))
    return replace(setting, line=line), kept
