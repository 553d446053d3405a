"""The command `prefect-rlhf graph`: the dataflow graph of an algorithm, from a terminal; no model or data is needed."""

from __future__ import annotations

import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prefect_rlhf.blocks.model import Model
from prefect_rlhf.flows.commands.flags import Flags, read_parameters
from prefect_rlhf.flows.forms.plan_options import plan_options
from prefect_rlhf.flows.planning.what_if import read_model_shape
from prefect_rlhf.flows.planning.what_if_arguments import read_arguments
from prefect_rlhf.flows.rlhf_flow import AlgorithmFlow, find_flow
from prefect_rlhf.flows.training.inputs import read_inputs
from prefect_rlhf.placement.atomic_file import write_atomically, writing
from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.placement.pictures.dataflow import dataflow_svg, dataflow_text

ANY_MODEL = "llama-7b"  # a graph's calls do not depend on what the models are


def parser() -> Flags:
    """Return the flags."""
    top = Flags(
        prog="prefect-rlhf graph", description="Show what an algorithm's calls read and wait for, as text and SVG."
    )
    top.add_argument("algorithm", help="ppo, dpo, grpo, remax, reward, module:function or file.py:function of your own")
    top.add_argument("--parameters", type=Path, help="YAML or JSON file of the flow's parameters")
    top.add_argument("-p", "--param", action="append", default=[], metavar="NAME=VALUE", help="one parameter, YAML")
    top.add_argument("--output", type=Path, metavar="FILE.svg", help="where the picture goes (default ALGORITHM.svg)")
    return top


def run(arguments: Sequence[str]) -> int:
    """Print the graph and write its picture; returns the exit status. Raises InvalidInput or GraphError."""
    options = parser().parse_args(arguments)
    parameters = read_parameters(options.parameters, options.param)
    graph = read_graph(find_flow(options.algorithm), options.algorithm, parameters)
    file = options.output or Path(f"{graph.name}.svg")
    with writing(file):
        write_atomically(file, lambda part: part.write_text(dataflow_svg(graph)))
    print(dataflow_text(graph), "", file, sep="\n")
    return 0


def read_graph(flow: AlgorithmFlow, name: str, parameters: Mapping[str, Any]) -> DataflowGraph:
    """Return the graph of an algorithm; what it is trained on, and which models, need not be said."""
    hints = typing.get_type_hints(flow.algorithm.body)
    models = {role: ANY_MODEL for role, hint in hints.items() if hint is Model}
    given = {key: value for key, value in parameters.items() if key in hints and key not in models}
    options = plan_options({"algorithm": name, "models": models, "parameters": given})
    arguments = read_arguments(flow, options, None)
    inputs = read_inputs(arguments, read_model_shape, may_be_absent=True)
    return flow.algorithm.trace(arguments, inputs.models, inputs.datasets)
