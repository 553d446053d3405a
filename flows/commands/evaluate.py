"""The command `prefect-rlhf evaluate`: measure any model on named sets of prompts, alone or against another."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from cyclopts import Parameter

from prefect_rlhf.flows.commands.flags import (
    ALL_AT_ONCE,
    Assignments,
    ChosenKind,
    ParametersFile,
    print_error,
    read_parameters,
    whole_number,
)
from prefect_rlhf.flows.commands.prefect_settings import check_prefect_settings
from prefect_rlhf.placement.devices.mesh import MOST_DEVICES


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateFlags:
    """The flags of `evaluate`."""

    model: Annotated[str, Parameter(help="Hugging Face or PEFT folder, or a model on the Hub; it can be anyone's.")] = (
        field(kw_only=False)
    )
    parameters: ParametersFile = None
    param: Assignments = ()
    against: Annotated[
        str | None, Parameter(metavar="MODEL", help="A second model; both answer the same prompts and are compared.")
    ] = None
    devices: Annotated[
        int | None,
        whole_number(1, MOST_DEVICES),
        Parameter(help="Number of this machine's devices to lease; default: 1.", show_default=False),
    ] = None
    kind: ChosenKind = None
    verbose: Annotated[bool, Parameter(help="Show the whole log on the terminal.")] = False
    dry_run: Annotated[bool, Parameter(help="Check everything, print the plan, use no device.")] = False


def evaluate(flags: Annotated[EvaluateFlags, ALL_AT_ONCE]) -> int:
    """Measure a model on named sets of prompts; nothing is trained.

    The sets are the `evaluation` in a parameter file. You can pass a training run's
    file: its reward, play and sampling are used too. Each metric comes with a 95%
    interval.

      prefect-rlhf evaluate runs/latest/actor --parameters parameters.yaml
      prefect-rlhf evaluate runs/latest/actor --parameters parameters.yaml --against models/smollm2
    """
    file, stated = read_parameters(flags.parameters, ()), read_parameters(None, flags.param)
    check_prefect_settings()
    # Imported here: --help and an error about a flag need no Prefect.
    from prefect_rlhf.flows.algorithm.evaluation.measured import Devices, compared, lines_of, measured, planned
    from prefect_rlhf.flows.algorithm.evaluation.parameters import read_evaluation

    parameters, unused = read_evaluation(flags.model, file, stated)
    on = Devices(flags.devices, flags.kind, flags.verbose)
    if unused:
        print_error(f"not used here, as nothing is trained: {', '.join(unused)}")
    if flags.dry_run:
        print(planned(parameters, on))
        return 0
    lines = lines_of(measured(parameters, on)) if flags.against is None else compared(parameters, flags.against, on)
    print(*lines, sep="\n")
    return 0
