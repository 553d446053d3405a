"""The command `prefect-rlhf graph`: the dataflow graph of an algorithm, from a terminal, without models or data."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from prefect_rlhf.files.atomic_file import write_atomically, writing
from prefect_rlhf.flows.algorithm.places import ALGORITHMS, find_place
from prefect_rlhf.flows.commands.flags import ALL_AT_ONCE, Assignments, ParametersFile, read_parameters
from prefect_rlhf.flows.commands.prefect_settings import check_prefect_settings

if TYPE_CHECKING:
    from prefect_rlhf.flows.algorithm.rlhf_flow import AlgorithmFlow
    from prefect_rlhf.placement.graph import DataflowGraph

ANY_MODEL = "llama-7b"  # a graph's calls do not depend on the models


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphFlags:
    """The flags of `graph`."""

    algorithm: Annotated[str, Parameter(help=f"{', '.join(ALGORITHMS)}, or file.py:function or module:function.")] = (
        field(kw_only=False)
    )
    parameters: ParametersFile = None
    param: Assignments = ()
    output: Annotated[
        Path | None, Parameter(metavar="FILE.svg", help="Where to write the picture; default: ALGORITHM.svg.")
    ] = None


def graph(flags: Annotated[GraphFlags, ALL_AT_ONCE]) -> int:
    """Draw an algorithm's calls and how they depend on each other, as text and as a picture.

    You need neither a model nor data.

    prefect-rlhf graph ppo
    prefect-rlhf graph my_flow.py:my_flow --output mine.svg
    """
    find_place(flags.algorithm)
    parameters = read_parameters(flags.parameters, flags.param)
    check_prefect_settings()
    from prefect_rlhf.flows.algorithm.rlhf_flow import (
        find_flow,  # imported here: an error about a flag or name needs no Prefect
    )
    from prefect_rlhf.tasks.reporting.pictures.dataflow import dataflow_svg, dataflow_text

    drawn = read_graph(find_flow(flags.algorithm), flags.algorithm, parameters)
    file = flags.output or Path(f"{drawn.name}.svg")
    with writing(file):
        write_atomically(file, lambda part: part.write_text(dataflow_svg(drawn)))
    print(dataflow_text(drawn), "", file, sep="\n")
    return 0


def read_graph(flow: AlgorithmFlow, name: str, parameters: Mapping[str, Any]) -> DataflowGraph:
    """Return an algorithm's graph; you may leave out models and datasets."""
    from prefect_rlhf.blocks.model import Model  # imported here, as in graph
    from prefect_rlhf.flows.forms.plan_options import plan_options
    from prefect_rlhf.flows.planning.what_if import read_model_shape
    from prefect_rlhf.flows.planning.what_if_arguments import read_arguments
    from prefect_rlhf.flows.training.inputs import read_inputs

    hints = typing.get_type_hints(flow.algorithm.body)
    models = {role: ANY_MODEL for role, hint in hints.items() if hint is Model}
    own = {*hints, "evaluation"} - models.keys()
    given = {key: value for key, value in parameters.items() if key in own}
    options = plan_options({"algorithm": name, "models": models, "parameters": given})
    arguments = read_arguments(flow, options, None)
    inputs = read_inputs(arguments, read_model_shape, may_be_absent=True)
    return flow.algorithm.trace(arguments, inputs.models, inputs.datasets)
