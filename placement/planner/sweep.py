"""The best plan of a question on clusters of several sizes, in a table: how many devices to rent."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.errors.table import table
from prefect_rlhf.placement.memory.certificate import Certificate
from prefect_rlhf.placement.planner.planned import Planned

ENOUGH = 0.6
"""Static memory use below which more devices bring less and less (ReaL, section 8.4 and figure 17)."""
STATIC_SHARES = ("gradients", "optimizer")  # states that are neither freed nor moved (ReaL, section 4)


@dataclass(frozen=True, slots=True)
class SizeResult:
    """The times of a plan on `num_devices`. If `refused` gives a reason, there is no plan: seconds and shares are None.

    `static_share` is the share of gradients and optimizer states in the memory of the device that has most of them.
    """

    num_nodes: int
    num_devices: int
    seconds: float | None = None
    lower_bound_seconds: float | None = None
    static_share: float | None = None
    refused: str = ""

    @property
    def device_hours(self) -> float | None:
        """Device hours of an iteration."""
        return None if self.seconds is None else self.seconds * self.num_devices / 3600


@dataclass(frozen=True, slots=True)
class Sweep:
    """The results of sizes in ascending order."""

    sizes: tuple[SizeResult, ...]

    @property
    def first_below(self) -> SizeResult | None:
        """The smallest size that has a plan and whose static memory use is below `ENOUGH`."""
        return next((s for s in self.sizes if s.static_share is not None and s.static_share < ENOUGH), None)

    def text(self) -> str:
        """Return a table, and its conclusion on the right size."""
        first = self.first_below
        nodes = "node" if first and first.num_nodes == 1 else "nodes"
        words = (
            f"static memory use is below {ENOUGH:.0%} from {first.num_nodes} {nodes} ({first.num_devices} devices) on"
            if first
            else f"static memory use does not fall below {ENOUGH:.0%} on any of these sizes"
        )
        return f"{table([_row(size) for size in self.sizes])}\n{words}"

    def to_json(self) -> str:
        """Return the sweep for a machine."""
        sizes = [{**asdict(size), "device_hours": size.device_hours} for size in self.sizes]
        first = self.first_below
        return json.dumps({"sizes": sizes, "first_below": first and first.num_nodes, "below": ENOUGH}, indent=1)


def sweep(num_nodes: Iterable[int], devices_per_node: int, planned: Callable[[int], Planned]) -> Sweep:
    """Ask `planned` for each number of nodes; a size for which it raises InvalidInput is refused."""
    results = []
    for count in sorted(set(num_nodes)):
        devices = count * devices_per_node
        try:
            best = planned(count)
        except InvalidInput as error:
            results.append(SizeResult(count, devices, refused=str(error)))
            continue
        share = static_share(best.certificate)
        results.append(SizeResult(count, devices, best.seconds, best.lower_bound_seconds, share))
    return Sweep(tuple(results))


def static_share(certificate: Certificate) -> float:
    """Return the largest share of a device that gradients and optimizer states fill for good."""
    used = []
    for peak in certificate.peaks:
        static = (share.num_bytes for share in peak.shares if share.what in STATIC_SHARES and not share.passing)
        used.append(sum(static) / peak.device_bytes)
    return max(used)


def check_sizes(num_nodes: Sequence[int], field: str = "sweep") -> None:
    """Raise InvalidInput for a number of nodes that no cluster has."""
    if num_nodes and min(num_nodes) < 1:
        raise InvalidInput(field, list(num_nodes), "numbers of nodes, each 1 or more")


def _row(size: SizeResult) -> dict[str, str]:
    return {
        "nodes": str(size.num_nodes),
        "devices": str(size.num_devices),
        "seconds": _shown(size.seconds, ".2f"),
        "bound": _shown(size.lower_bound_seconds, ".2f"),
        "device-hours": _shown(size.device_hours, ".3f"),
        "static memory": _shown(size.static_share, ".1%"),
        "note": size.refused,
    }


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
