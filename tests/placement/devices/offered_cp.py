"""What the product says of context parallelism once an engine offers it; prints JSON.

Sources of two modules are changed as they are imported: the axis's entry in the table, and the fields of a strategy.
"""

import importlib.util
import json
import sys
from inspect import Signature

EDITS = {
    "axes": {"is_offered=False": "is_offered=True"},
    "strategy": {
        "    ep: int = 1\n": "    ep: int = 1\n    cp: int = 1\n",
        "    pp: int\n": "    pp: int\n    cp: int = 0\n",
    },
}


def offer() -> None:
    """Import the two modules with their edits, before anything else imports them."""
    for name, edits in EDITS.items():
        path = f"prefect_rlhf.placement.devices.{name}"
        spec = importlib.util.find_spec(path)
        assert spec and spec.loader and spec.origin and path not in sys.modules
        module = sys.modules[path] = importlib.util.module_from_spec(spec)
        text = spec.loader.get_source(path)
        for old, new in edits.items():
            assert text.count(old) == 1, (path, old)
            text = text.replace(old, new)
        exec(compile(text, spec.origin, "exec"), vars(module))


def answers() -> dict[str, object]:
    """Return what texts, checks and files say of cp, with values that JSON has."""
    from dataclasses import replace

    import yaml

    from prefect_rlhf.flows.forms.check import checked_parameters
    from prefect_rlhf.flows.forms.options import RunOptions
    from prefect_rlhf.placement.devices.mesh import ClusterShape, DeviceMesh
    from prefect_rlhf.placement.devices.strategy import Strategy
    from prefect_rlhf.placement.planner.preset_plan import preset
    from prefect_rlhf.placement.plans.check import violations
    from prefect_rlhf.placement.plans.plan_file import parse_plan, plan_yaml
    from prefect_rlhf.tasks.reporting.pictures.text import plan_rows
    from tests.support.strategies import GIB, dpo

    strategy = Strategy(dp=2, tp=2, cp=2)
    cluster, graph = ClusterShape("desk", 1, 8, 64 * GIB), dpo()
    plan = preset("flattening", graph, cluster, DeviceMesh(0, 1, 0, 8))
    name, placed = plan.placements[0]
    spread = replace(plan, placements=((name, replace(placed, strategy=strategy)), *plan.placements[1:]))
    wrong = replace(placed, strategy=replace(strategy, cp=4))
    return {
        "text": str(strategy),
        "devices": [strategy.num_devices, strategy.replica_devices],
        "strides": {axis: strategy.stride(axis) for axis in ("tp", "cp", "dp")},
        "places": [(at.dp, at.cp, at.tp) for at in strategy.coordinates()],
        "file": parse_plan(yaml.safe_load(plan_yaml(spread)), cluster)[name].strategy == strategy,
        "row": plan_rows(spread, graph)[0]["cp"],
        "violation": str(next(violations(graph.call(name), wrong, graph, "cpu"))),
        "parameter": checked_parameters(Signature(RunOptions.signature()), {"placement": {name: {"cp": 2}}})[
            "placement"
        ][name].cp,
    }


if __name__ == "__main__":
    offer()
    sys.stdout.write(json.dumps(answers()))
