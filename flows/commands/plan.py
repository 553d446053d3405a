"""The command `prefect-rlhf plan`: a plan for a cluster that need not be there, from a terminal."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import yaml

from prefect_rlhf.flows.commands.flags import pairs, read_parameters
from prefect_rlhf.flows.forms.plan_options import PlanOptions, plan_options
from prefect_rlhf.flows.planning.answer import answer_question
from prefect_rlhf.placement.errors import InvalidInput
from prefect_rlhf.placement.search.driver import Progress

FLAGS = {
    "cluster": "--cluster",
    "network": "--network",
    "device_memory_gib": "--device-memory-gib",
    "prompt_length": "--prompt-length",
    "response_length": "--response-length",
    "batch_size": "--batch-size",
    "method": "--method",
    "budget_seconds": "--budget",
    "output_dir": "--output",
}
"""Fields of PlanOptions that take one value."""


def parser() -> argparse.ArgumentParser:
    """The flags; what they mean is said once, by the fields of PlanOptions."""
    says = {name: field.description for name, field in PlanOptions.model_fields.items()}
    top = argparse.ArgumentParser(prog="prefect-rlhf plan", description=__doc__)
    top.add_argument("algorithm", help=says["algorithm"])
    top.add_argument("--model", action="append", default=[], metavar="ROLE=MODEL", help=says["models"])
    top.add_argument("--parameters", type=Path, help="YAML or JSON file of the flow's parameters")
    top.add_argument("-p", "--param", action="append", default=[], metavar="NAME=VALUE", help="one parameter, YAML")
    top.add_argument("--profile", action="append", default=[], metavar="FILE", help=says["profiles"])
    top.add_argument("--explain", action="store_true", help=says["explain"])
    top.add_argument("--sweep", metavar="NODES,...", help=says["sweep"])
    for name, flag in FLAGS.items():
        top.add_argument(flag, dest=name, help=says[name])
    return top


def run(arguments: Sequence[str]) -> int:
    """Answer the question; returns the exit status. Ctrl-C ends the search with the best plan so far."""
    options = read_options(parser().parse_args(arguments))
    with interruptible() as progress:
        answer = answer_question(options, progress)
    paths = answer.write(Path(options.output_dir).expanduser())
    print(answer.text(), "", *paths.values(), sep="\n")
    return 0


def read_options(given: argparse.Namespace) -> PlanOptions:
    """The flags as values. Raises InvalidInput for the first that is wrong."""
    words = {"cluster", "network", "prompt_length", "response_length", "output_dir", "method"}
    values: dict[str, Any] = {
        name: value if name in words else yaml.safe_load(value)
        for name in FLAGS
        if (value := getattr(given, name)) is not None
    }
    return plan_options(
        values
        | {
            "algorithm": given.algorithm,
            "models": pairs("--model", given.model),
            "parameters": read_parameters(given.parameters, given.param),
            "profiles": given.profile,
            "explain": given.explain,
            "sweep": _counts(given.sweep),
        }
    )


def _counts(text: str | None) -> list[int]:
    try:
        return [int(part) for part in text.split(",")] if text else []
    except ValueError as error:
        raise InvalidInput("--sweep", text, "numbers of nodes, such as 1,2,4") from error


@contextmanager
def interruptible() -> Iterator[Any]:
    """Progress on stderr, which the first Ctrl-C turns into the end of the search; a second one ends the program."""
    asked = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        signal.signal(signal.SIGINT, before)

    def show(progress: Progress) -> None:
        print(progress, file=sys.stderr, flush=True)
        if asked:
            raise KeyboardInterrupt  # as the search's driver expects it: it returns the best so far

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield show
    finally:
        signal.signal(signal.SIGINT, before)
