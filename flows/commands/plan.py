"""The command `prefect-rlhf plan`: a plan for a cluster that need not be there, from a terminal."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from prefect_rlhf.flows.commands.flags import Flags, print_error, read_numbers, read_pairs, read_parameters
from prefect_rlhf.flows.forms.plan_options import PlanOptions, plan_options
from prefect_rlhf.flows.planning.answer import answer_question
from prefect_rlhf.placement.search.driver import Progress
from prefect_rlhf.placement.yaml_text import parse_yaml

FLAGS = {
    "cluster": "--cluster",
    "device": "--device",
    "network": "--network",
    "device_memory_gib": "--device-memory-gib",
    "call_seconds": "--call-seconds",
    "prompt_length": "--prompt-length",
    "response_length": "--response-length",
    "batch_size": "--batch-size",
    "plan": "--plan",
    "method": "--method",
    "budget_seconds": "--budget",
    "output_dir": "--output",
}
"""Fields of PlanOptions that take one value."""
NUMBERS = {"device_memory_gib", "call_seconds", "batch_size", "budget_seconds"}
"""Those whose value is read as YAML; the others are words."""


def parser() -> Flags:
    """Return the flags; what they mean is said once, by the fields of PlanOptions."""
    help_of = {name: field.description for name, field in PlanOptions.model_fields.items()}
    top = Flags(prog="prefect-rlhf plan", description=__doc__)
    top.add_argument("algorithm", help=help_of["algorithm"])
    top.add_argument("--model", action="append", default=[], metavar="ROLE=MODEL", help=help_of["models"])
    top.add_argument("--parameters", type=Path, help="YAML or JSON file of the flow's parameters")
    top.add_argument("-p", "--param", action="append", default=[], metavar="NAME=VALUE", help="one parameter, YAML")
    top.add_argument("--profile", action="append", default=[], metavar="FILE", help=help_of["profiles"])
    top.add_argument("--pin", action="append", default=[], metavar="CALL=MESH", help=help_of["pins"])
    top.add_argument("--explain", action="store_true", help=help_of["explain"])
    top.add_argument("--sweep", metavar="NODES,...", help=help_of["sweep"])
    for name, flag in FLAGS.items():
        top.add_argument(flag, dest=name, help=help_of[name])
    return top


def run(arguments: Sequence[str]) -> int:
    """Answer the question; returns the exit status. Ctrl-C ends the search with the best plan so far."""
    options = read_options(parser().parse_args(arguments))
    with interruptible() as progress:
        answer = answer_question(options, progress)
    paths = answer.write(Path(options.output_dir).expanduser())
    print(answer.text(), "", *paths.values(), sep="\n")
    return 0


def read_options(flags: argparse.Namespace) -> PlanOptions:
    """Return the flags as values. Raises InvalidInput for the first that is wrong."""
    values: dict[str, Any] = {
        name: parse_yaml(FLAGS[name], value, value) if name in NUMBERS else value
        for name in FLAGS
        if (value := getattr(flags, name)) is not None
    }
    values |= {
        "algorithm": flags.algorithm,
        "models": read_pairs("--model", flags.model),
        "parameters": read_parameters(flags.parameters, flags.param),
        "profiles": flags.profile,
        "pins": read_pairs("--pin", flags.pin),
        "explain": flags.explain,
        "sweep": read_numbers("--sweep", flags.sweep, "numbers of nodes, such as 1,2,4"),
    }
    return plan_options(values)


@contextmanager
def interruptible() -> Iterator[Callable[[Progress], None]]:
    """Yield what prints progress on stderr, and turns the first Ctrl-C into the end of the search.

    A second Ctrl-C ends the program.
    """
    interrupted = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        signal.signal(signal.SIGINT, before)

    def show(progress: Progress) -> None:
        print_error(progress)
        if interrupted:
            raise KeyboardInterrupt  # as the search's driver expects it: it returns the best so far

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield show
    finally:
        signal.signal(signal.SIGINT, before)
