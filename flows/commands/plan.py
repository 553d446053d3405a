"""The command `prefect-rlhf plan`: a plan for any cluster, from a terminal."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from json import dumps
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from prefect_rlhf.errors.errors import InvalidInput, TooLittleMemory
from prefect_rlhf.files.remote_path import require_local
from prefect_rlhf.files.yaml_text import parse_yaml
from prefect_rlhf.flows.algorithm.places import find_place
from prefect_rlhf.flows.commands.flags import (
    ALL_AT_ONCE,
    Assignments,
    ParametersFile,
    print_error,
    read_numbers,
    read_pairs,
    read_parameters,
)
from prefect_rlhf.flows.commands.prefect_settings import check_prefect_settings
from prefect_rlhf.flows.forms.plan_options import PlanOptions, plan_options

if TYPE_CHECKING:
    from prefect_rlhf.placement.search.driver import Progress

NUMBERS = (
    "device_memory_gib",
    "host_memory_gib",
    "headroom",
    "expert_imbalance",
    "call_seconds",
    "batch_size",
    "evaluations",
    "simplicity",
    "budget_seconds",
    "at_least",
)
"""Flags whose value is read as YAML; the others are words."""


def _flag(field_name: str, name: str | None = None, metavar: str | None = None) -> Parameter:
    """Return a flag with the description and default of a field of PlanOptions."""
    option = PlanOptions.model_fields[field_name]
    default = f" [default: {option.default}]" if option.default else ""
    return Parameter(name=name, metavar=metavar, help=f"{option.description}{default}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFlags:
    """The flags of `plan`: the fields of PlanOptions as texts."""

    algorithm: Annotated[str, Parameter(help=PlanOptions.model_fields["algorithm"].description)] = field(kw_only=False)
    models: Annotated[tuple[str, ...], _flag("models", "--model", "ROLE=MODEL")] = ()
    cluster: Annotated[str | None, _flag("cluster", metavar="NODESxDEVICES:KIND,...")] = None
    device: Annotated[str | None, _flag("device")] = None
    network: Annotated[str | None, _flag("network")] = None
    device_memory_gib: Annotated[str | None, _flag("device_memory_gib", metavar="GIB")] = None
    headroom: Annotated[str | None, _flag("headroom", metavar="SHARE")] = None
    host_memory_gib: Annotated[str | None, _flag("host_memory_gib", metavar="GIB")] = None
    expert_imbalance: Annotated[str | None, _flag("expert_imbalance", metavar="RATIO")] = None
    call_seconds: Annotated[str | None, _flag("call_seconds", metavar="SECONDS")] = None
    runtime: Annotated[str | None, _flag("runtime")] = None
    prompt_length: Annotated[str | None, _flag("prompt_length", metavar="TOKENS")] = None
    response_length: Annotated[str | None, _flag("response_length", metavar="TOKENS")] = None
    batch_size: Annotated[str | None, _flag("batch_size", metavar="N")] = None
    parameters: ParametersFile = None
    param: Assignments = ()
    profiles: Annotated[tuple[str, ...], _flag("profiles", "--profile", "FILE")] = ()
    plan: Annotated[str | None, _flag("plan", metavar="FILE")] = None
    pins: Annotated[tuple[str, ...], _flag("pins", "--pin", "CALL=MESH")] = ()
    prices: Annotated[tuple[str, ...], _flag("prices", "--price", "KIND=DOLLARS,...")] = ()
    method: Annotated[str | None, _flag("method")] = None
    evaluations: Annotated[str | None, _flag("evaluations", metavar="N")] = None
    budget_seconds: Annotated[str | None, _flag("budget_seconds", "--budget", "SECONDS")] = None
    simplicity: Annotated[str | None, _flag("simplicity", metavar="SHARE")] = None
    explain: Annotated[bool, _flag("explain")] = False
    sweep: Annotated[str | None, _flag("sweep", metavar="NODES,...")] = None
    at_least: Annotated[str | None, _flag("at_least", metavar="TOKENS")] = None
    output_dir: Annotated[str | None, _flag("output_dir", "--output", "FOLDER")] = None
    json: Annotated[bool, Parameter(help="Print the answer as JSON, even if no plan fits.")] = False


def plan(flags: Annotated[PlanFlags, ALL_AT_ONCE]) -> int:
    """Search for an algorithm's best plan on a cluster that you need not have.

    A plan says on which devices each call runs, and how these divide the work. The
    answer begins with three lines: whether it fits, what a step takes in seconds and
    dollars, and the command that runs it. Then come the plan, the usual placements
    and notes; --explain adds the proof, the search and the memory:

      prefect-rlhf plan ppo --model actor=llama-70b --model critic=llama-7b \\
        --cluster 16x8:h100 --batch-size 512 \\
        --prompt-length 1024 --response-length 1024

    It uses no device. Ctrl-C ends the search with the best plan so far.
    """
    find_place(flags.algorithm)
    options = read_options(flags)
    check_prefect_settings()
    # Imported here: an error about a flag or name needs no Prefect, and an error about a parameter needs no planner.
    from prefect_rlhf.flows.algorithm.rlhf_flow import find_flow
    from prefect_rlhf.flows.planning.what_if_arguments import read_arguments

    read_arguments(find_flow(options.algorithm), options, None)
    from prefect_rlhf.placement.search.compiled import announce_compilation

    if not options.plan:
        announce_compilation()  # first, since the planner takes a second to import
    from prefect_rlhf.flows.planning.answer import answer_question

    with interruptible() as progress:
        try:
            answer = answer_question(options, progress, parameter_words(flags))
        except TooLittleMemory as error:
            if not flags.json:
                raise
            print(dumps({"fits": False, "refused": str(error), "report": getattr(error, "report", "")}, indent=1))
            return 2
    paths = answer.write(require_local(options.output_dir, "output_dir").expanduser())
    if flags.json:
        print(answer.to_json(paths))
    else:
        print(answer.text(), "", *paths.values(), sep="\n")
    return 0


def parameter_words(flags: PlanFlags) -> list[str]:
    """Return the words of the command that state parameters: a run takes them as they stand."""
    file = ["--parameters", str(flags.parameters)] if flags.parameters else []
    return [*file, *(word for text in flags.param for word in ("-p", text))]


def read_options(flags: PlanFlags) -> PlanOptions:
    """Return the flags as options. Raises InvalidInput for the first mistake."""
    values: dict[str, Any] = {
        each.name: value
        for each in fields(flags)
        if each.name in PlanOptions.model_fields and (value := getattr(flags, each.name)) is not None
    }
    for name in NUMBERS:
        if name in values:
            values[name] = parse_yaml(f"--{name.replace('_', '-')}", values[name], values[name])
    return plan_options(
        values
        | {
            "models": read_pairs("--model", flags.models, "ROLE=MODEL, such as actor=llama-7b"),
            "parameters": read_parameters(flags.parameters, flags.param),
            "profiles": list(flags.profiles),
            "pins": read_pairs("--pin", flags.pins, "CALL=MESH, such as ref_inference=n0:0-3"),
            "prices": read_prices(flags.prices, flags.cluster),
            "sweep": read_numbers("--sweep", flags.sweep, "numbers of nodes, such as 1,2,4"),
        }
    )


def read_prices(texts: Sequence[str], cluster: str | None = None) -> dict[str, Any]:
    """Return the values of `--price`, each a list such as h100=2.5,a100-80=1.6. Raises InvalidInput without an `=`.

    The message shows the price of the first kind in `cluster`.
    """
    pairs = [part.strip() for text in texts for part in text.split(",")]
    prices: dict[str, Any] = {}
    kinds = re.findall(r":([\w.-]+)", cluster or "") or ["h100"]
    for name, value in ((each, read_pairs("--price", [each], _price_form(kinds[0], each))) for each in pairs):
        (kind,) = value
        if kind in prices:
            raise InvalidInput("--price", name, f"a single price for {kind}")
        prices[kind] = parse_yaml(f"--price {kind}", value[kind], value[kind])
    return prices


def _price_form(kind: str, text: str) -> str:
    dollars = text.removeprefix("$")
    return f"KIND=DOLLARS, such as {kind}={dollars if dollars.replace('.', '', 1).isdecimal() else 2.5}"


QUIET_SECONDS = 1.0  # of a search, before its progress is shown


@contextmanager
def interruptible() -> Iterator[Callable[[Progress], None]]:
    """Yield a function that prints progress on stderr; the first Ctrl-C ends the search.

    A second Ctrl-C ends the program.
    """
    interrupted = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        signal.signal(signal.SIGINT, before)

    def show(progress: Progress) -> None:
        if interrupted or progress.elapsed_seconds >= QUIET_SECONDS:
            print_error(progress)
        if interrupted:
            raise KeyboardInterrupt  # the search's driver expects it and returns the best plan so far

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield show
    finally:
        signal.signal(signal.SIGINT, before)
