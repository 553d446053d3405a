"""The command `prefect-rlhf profile`: measure on this machine's devices, from a terminal."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from prefect_rlhf.errors.errors import Missing, NotUsed
from prefect_rlhf.flows.commands.flags import ALL_AT_ONCE, ChosenKind, print_error, read_numbers, whole_number
from prefect_rlhf.flows.commands.prefect_settings import check_prefect_settings
from prefect_rlhf.placement.devices.mesh import MOST_DEVICES, MOST_NODES
from prefect_rlhf.placement.models.model import Dtype
from prefect_rlhf.tasks.profiling.limits import MOST_ROWS, MOST_TOKENS

if TYPE_CHECKING:
    from prefect_rlhf.tasks.profiling.measure import Say


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileFlags:
    """The flags of `profile`."""

    model: Annotated[
        str, Parameter(help="A Hugging Face folder or a model on the Hub (only its config.json), or a known model.")
    ] = field(default="", kw_only=False)
    devices: Annotated[
        int,
        whole_number(1, MOST_DEVICES),
        Parameter(help="Number of this machine's devices; all work at the same time."),
    ] = 1
    nodes: Annotated[
        int,
        whole_number(1, MOST_NODES),
        Parameter(help="Number of nodes in the Ray cluster at RAY_ADDRESS, each with this many devices."),
    ] = 1
    kind: ChosenKind = None
    dtype: Annotated[Dtype, Parameter(help="Compute format.", show_default=True)] = "bfloat16"
    rows: Annotated[int, whole_number(1, MOST_ROWS), Parameter(help="Most rows in a micro-batch.")] = 32
    longest: Annotated[int, whole_number(16, MOST_TOKENS), Parameter(help="Longest row, in tokens.")] = 128
    tensor_parallel: Annotated[
        str | None, Parameter(metavar="TP,...", help="Degrees of tensor parallelism; default: all possible degrees.")
    ] = None
    forget: Annotated[
        bool, Parameter(help="Delete what plan: auto has measured on this machine; measure nothing now.")
    ] = False
    dry_run: Annotated[
        bool, Parameter(help="Print how many measurements it would take, and the profile's file; measure nothing.")
    ] = False


def profile(flags: Annotated[ProfileFlags, ALL_AT_ONCE] = ProfileFlags()) -> int:  # frozen
    """Measure a model's layers on one or several machines' devices. Takes minutes.

    Later plans and predictions for a model of this shape, on the same number and
    kind of devices, use the measurements:

      prefect-rlhf profile models/smollm2 --devices 2
    """
    if flags.forget:
        return forget(flags)
    if not flags.model:
        raise Missing("model", "a Hugging Face folder, or a known model such as llama-7b")
    check_prefect_settings()
    from prefect_rlhf.blocks.cluster import Cluster  # imported here: a wrong flag needs neither Prefect nor torch
    from prefect_rlhf.blocks.lease import lease
    from prefect_rlhf.files.engine_builds import chosen_kind
    from prefect_rlhf.flows.hardware.device_kind import check_leased_gpus
    from prefect_rlhf.flows.hardware.installed_engines import check_engines
    from prefect_rlhf.flows.profile import measure_profile, profile_request
    from prefect_rlhf.tasks.profiling.bench import Sizes

    kind = chosen_kind(flags.kind)
    cluster = Cluster(num_nodes=flags.nodes, devices_per_node=flags.devices, kind=kind).shape
    degrees = read_numbers("--tensor-parallel", flags.tensor_parallel, "degrees, such as 1,2")
    sizes = Sizes(flags.rows, flags.longest)
    request = profile_request(flags.model, flags.dtype, kind, cluster.whole, sizes, degrees)
    if flags.dry_run:
        print(f"{request.num_measurements} measurements of {flags.model}, to be stored in {request.file}")
        return 0
    check_engines(kind)
    with lease(cluster, cluster.whole.num_devices, kind=kind, say=print_error) as leased:
        check_leased_gpus(leased)
        print(measure_profile(leased, request, progress(), print_error))
    return 0


def forget(flags: ProfileFlags) -> int:
    """Delete the stored probes. Raises NotUsed if other flags come with `--forget`."""
    from prefect_rlhf.flows.hardware.probes import forget_probes

    for name, value in asdict(replace(flags, forget=False)).items():
        if value != ProfileFlags.__dataclass_fields__[name].default:
            raise NotUsed(name, value, "--forget measures nothing")
    number = forget_probes()
    print(f"{number} stored probe{'' if number == 1 else 's'} removed; the next search of plan: auto probes again")
    return 0


def progress() -> Say:
    """Return a function that prints each measurement on stderr, with the elapsed time."""
    began = time.monotonic()

    def say(number: int, total: int, words: str) -> None:
        print_error(f"{time.monotonic() - began:6.0f} s  {number}/{total}  {words}")

    return say
