"""The command `prefect-rlhf profile`: measure on this machine's devices, from a terminal."""

from __future__ import annotations

import time
from collections.abc import Sequence

from prefect_rlhf.blocks.cluster import MOST_DEVICES, Cluster
from prefect_rlhf.blocks.lease import lease
from prefect_rlhf.flows.commands.flags import Flags, print_error, read_numbers, whole_number
from prefect_rlhf.flows.profile import MOST_ROWS, MOST_TOKENS, measure_profile, profile_request
from prefect_rlhf.tasks.profiling.bench import Sizes
from prefect_rlhf.tasks.profiling.measure import Say


def parser() -> Flags:
    """Return the flags."""
    top = Flags(prog="prefect-rlhf profile", description=__doc__)
    top.add_argument("model", help="a Hugging Face folder, of which config.json is read, or a known model")
    top.add_argument(
        "--devices",
        type=whole_number(1, MOST_DEVICES),
        default=1,
        help="devices of this machine, which all work at once",
    )
    top.add_argument("--kind", choices=["cpu", "cuda"], default="cpu", help="what the devices are (default cpu)")
    top.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="compute format")
    top.add_argument(
        "--rows", type=whole_number(1, MOST_ROWS), default=32, help="most rows of a micro-batch (default 32)"
    )
    top.add_argument(
        "--longest", type=whole_number(16, MOST_TOKENS), default=128, help="most tokens of a row (default 128)"
    )
    top.add_argument("--tensor-parallel", metavar="TP,...", help="degrees; without it, all that are possible")
    top.add_argument("--dry-run", action="store_true", help="say what would be measured and kept where")
    return top


def run(arguments: Sequence[str]) -> int:
    """Measure, keep, and say where; returns the exit status. Raises InvalidInput for the first mistake."""
    options = parser().parse_args(arguments)
    cluster = Cluster(devices_per_node=options.devices).shape
    degrees = read_numbers("--tensor-parallel", options.tensor_parallel, "degrees, such as 1,2")
    sizes = Sizes(options.rows, options.longest)
    request = profile_request(options.model, options.dtype, options.kind, options.devices, sizes, degrees)
    if options.dry_run:
        print(f"{request.num_measurements} measurements of {options.model}, to be kept in {request.file}")
        return 0
    with lease(cluster, options.devices, kind=options.kind, say=print_error) as leased:
        print(measure_profile(leased, request, progress()))
    return 0


def progress() -> Say:
    """Return what prints each measurement on stderr, with the time so far."""
    began = time.monotonic()

    def say(number: int, total: int, words: str) -> None:
        print_error(f"{time.monotonic() - began:6.0f} s  {number}/{total}  {words}")

    return say
