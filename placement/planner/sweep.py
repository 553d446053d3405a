"""A question's best plan on several clusters, as a table: which devices to rent, and how many."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass

from prefect_rlhf.errors.errors import InvalidInput, NoClusterFits, NoClusterSuffices, TooLittleMemory
from prefect_rlhf.errors.table import table
from prefect_rlhf.placement.memory.certificate import NEARLY_FULL, Certificate
from prefect_rlhf.placement.planner.planned import Planned
from prefect_rlhf.placement.schedule.throughput import IterationWork

ENOUGH = 0.6
"""Static memory use below which more devices bring diminishing returns (ReaL, section 8.4 and figure 17)."""
STATIC_SHARES = ("gradients", "optimizer")  # states that are neither freed nor moved (ReaL, section 4)


@dataclass(frozen=True, slots=True)
class ClusterSize:
    """A row of the table: the name of a cluster such as `2x8:h100`, and its kind of nodes, such as
    `a100-40+v100-32`.
    """

    name: str
    kind: str
    num_nodes: int
    devices_per_node: int

    @property
    def num_devices(self) -> int:
        """The number of devices on all nodes."""
        return self.num_nodes * self.devices_per_node


@dataclass(frozen=True, slots=True)
class SizedPlan:
    """A plan for a cluster: an iteration's work and price, the used share of the fullest device, and the MFU.

    The MFU is that of all devices, and None on CPU.
    """

    planned: Planned
    work: IterationWork
    fullest_share: float
    utilisation: float | None = None


@dataclass(frozen=True, slots=True)
class SizeResult:
    """A plan's figures on a cluster; without a plan they are None."""

    cluster: str
    kind: str
    num_nodes: int
    num_devices: int
    seconds: float | None = None
    lower_bound_seconds: float | None = None
    static_share: float | None = None
    """Of the memory, for gradients and optimizer states, on the device with most of them."""
    fullest_share: float | None = None
    """The used share of the fullest device."""
    tokens_per_second: float | None = None
    """Of prompts and responses."""
    utilisation: float | None = None
    dollars_per_hour: float | None = None
    dollars_per_million_response_tokens: float | None = None
    refused: str = ""
    """Why there is no plan."""
    lacks_memory: bool = False
    """Whether the reason is too little memory."""

    @classmethod
    def of(cls, size: ClusterSize, sized: SizedPlan) -> "SizeResult":
        """Return a plan's figures on a cluster."""
        planned, work = sized.planned, sized.work
        return cls(
            size.name,
            size.kind,
            size.num_nodes,
            size.num_devices,
            planned.seconds,
            planned.lower_bound_seconds,
            static_share(planned.certificate),
            sized.fullest_share,
            work.tokens / planned.seconds,
            sized.utilisation,
            work.dollars_per_hour,
            work.dollars_per_million(planned.seconds),
        )

    @property
    def device_hours(self) -> float | None:
        """An iteration's device-hours."""
        return None if self.seconds is None else self.seconds * self.num_devices / 3600

    @property
    def dollars_a_step(self) -> float | None:
        """An iteration's price in dollars; None without a plan or a price."""
        if self.seconds is None or self.dollars_per_hour is None:
            return None
        return self.seconds * self.dollars_per_hour / 3600


@dataclass(frozen=True, slots=True)
class Sweep:
    """The results for several clusters: kinds in the question's order, and sizes of a kind in ascending order.

    `at_least` is the number of tokens per second that the question requires, or None. `enough` says in words how many
    devices are enough, if that size is not in the table.
    """

    sizes: tuple[SizeResult, ...]
    at_least: float | None = None
    enough: str = ""

    @property
    def first_below(self) -> dict[str, SizeResult | None]:
        """For each kind, the smallest size that has a plan with a static memory use below `ENOUGH`."""
        kinds = dict.fromkeys(size.kind for size in self.sizes)
        return {kind: next((size for size in self.sizes if _is_below(size, kind)), None) for kind in kinds}

    @property
    def smallest(self) -> SizeResult | None:
        """The smallest cluster that has a plan and reaches `at_least`; None if no cluster does.

        With prices this is the cheapest cluster per hour, otherwise the cluster with the fewest devices; of equal
        clusters the fastest.
        """
        enough = (size for size in self._planned if (size.tokens_per_second or 0.0) >= (self.at_least or 0.0))
        return min(enough, key=_price, default=None)

    @property
    def cheapest(self) -> SizeResult | None:
        """The cluster with the cheapest step, in dollars if prices are known, else in device-hours; None without a
        plan.
        """
        has_prices = all(size.dollars_per_hour is not None for size in self._planned)
        return min(self._planned, key=lambda size: _of_a_step(size, has_prices), default=None)

    @property
    def fastest(self) -> SizeResult | None:
        """The cluster with the most tokens per second; None if no cluster has a plan."""
        return max(self._planned, key=lambda size: size.tokens_per_second or 0.0, default=None)

    @property
    def _planned(self) -> Iterator[SizeResult]:
        return (size for size in self.sizes if size.seconds)

    def text(self) -> str:
        """Return the table with its conclusions."""
        has_prices = any(size.dollars_per_hour is not None for size in self.sizes)
        below, lines = self.first_below, []
        for kind, first in below.items():
            if first is None or all(size.num_devices <= first.num_devices for size in self._planned):
                continue  # it says nothing about these sizes
            words = (
                f"beyond {first.num_devices} devices a step gains less and less: from there on gradients and optimizer "
                f"states fill less than {ENOUGH:.0%} of a device"
            )
            lines.append(f"{kind}: {words}" if len(below) > 1 else words)
        return "\n".join([table([_row(size, has_prices) for size in self.sizes]), *self._conclusion(), *lines])

    def _conclusion(self) -> list[str]:
        smallest = self.smallest
        if smallest is None or len(self.sizes) == 1:
            return []
        by = "fewest dollars an hour" if smallest.dollars_per_hour is not None else "fewest devices"
        reaches = "has a plan" if self.at_least is None else f"reaches {self.at_least:,.0f} tokens/s"
        lines = [f"{smallest.cluster} is the smallest cluster that {reaches} ({by})"]
        if self.enough:
            lines.append(self.enough)
        if (cheapest := self.cheapest) is not None:
            dollars = cheapest.dollars_a_step
            cost = f"{cheapest.device_hours:.3g} device-hours" if dollars is None else f"${dollars:,.3g}"
            lines.append(f"{cheapest.cluster} is the cheapest per step: {cost}")
        return lines

    def to_json(self) -> str:
        """Return the sweep as JSON."""
        own = ("device_hours", "dollars_a_step")
        sizes = [{**asdict(size), **{name: getattr(size, name) for name in own}} for size in self.sizes]
        first = {kind: size and size.num_nodes for kind, size in self.first_below.items()}
        answer = {"at_least": self.at_least, "smallest": self.smallest and self.smallest.cluster}
        answer |= {"cheapest": self.cheapest and self.cheapest.cluster, "enough": self.enough}
        return json.dumps({"sizes": sizes, "first_below": first, "below": ENOUGH, **answer}, indent=1)


def sweep(
    sizes: Iterable[ClusterSize], planned: Callable[[ClusterSize], SizedPlan], at_least: float | None = None
) -> Sweep:
    """Call `planned` once for each cluster; a cluster is refused if it raises InvalidInput.

    If all clusters are refused with the same words, the question itself is wrong, and that error is raised.
    """
    results, errors = [], []
    for size in dict.fromkeys(sizes):
        try:
            results.append(SizeResult.of(size, planned(size)))
        except InvalidInput as error:
            errors.append(error)
            lacks_memory = isinstance(error, TooLittleMemory)
            limit = error.expected.partition(":")[0]  # what a plan may fill; remedies follow
            refused = f"does not fit: {error.seen}; {limit}" if lacks_memory else str(error)
            shape = size.name, size.kind, size.num_nodes, size.num_devices
            results.append(SizeResult(*shape, refused=refused, lacks_memory=lacks_memory))
    if len(errors) == len(results) and len({str(error) for error in errors}) == 1:
        raise errors[0]
    return Sweep(tuple(results), at_least)


def smallest_cluster(table: Sweep) -> SizeResult:
    """Return the smallest cluster that suffices.

    Raises NoClusterFits if every cluster has too little memory, and NoClusterSuffices for other reasons.
    """
    if table.smallest is not None:
        return table.smallest
    fastest = table.fastest
    if fastest is None:
        names = ", ".join(size.cluster for size in table.sizes)
        if not all(size.lacks_memory for size in table.sizes):
            raise NoClusterSuffices("cluster", names, "a cluster with a plan: change what a row notes", table.text())
        shown = "a cluster with a plan that fits: more or larger devices, shorter rows, or smaller models"
        raise NoClusterFits("cluster", names, shown, table.text())
    most = f"at most {fastest.tokens_per_second:,.0f} tokens/s, which {fastest.cluster} reaches, or more devices"
    raise NoClusterSuffices("at_least", table.at_least, most, table.text())


def static_share(certificate: Certificate) -> float:
    """Return the largest share of a device's memory that gradients and optimizer states occupy permanently."""
    used = []
    for peak in certificate.peaks:
        static = (share.num_bytes for share in peak.shares if share.what in STATIC_SHARES and not share.passing)
        used.append(sum(static) / peak.device_bytes)
    return max(used)


def check_sizes(num_nodes: Sequence[int], field: str = "sweep") -> None:
    """Raise InvalidInput for an invalid number of nodes."""
    if num_nodes and min(num_nodes) < 1:
        raise InvalidInput(field, list(num_nodes), "numbers of nodes, each 1 or more")


def _is_below(size: SizeResult, kind: str) -> bool:
    return size.kind == kind and size.static_share is not None and size.static_share < ENOUGH


def _price(size: SizeResult) -> tuple[float, float]:
    cost = size.num_devices if size.dollars_per_hour is None else size.dollars_per_hour
    return cost, -(size.tokens_per_second or 0.0)


def _of_a_step(size: SizeResult, has_prices: bool) -> float:
    return (size.dollars_a_step if has_prices else size.device_hours) or 0.0


def _row(size: SizeResult, has_prices: bool) -> dict[str, str]:
    dollars = {
        "$/hour": _shown(size.dollars_per_hour, ",.2f"),
        "$/step": _shown(size.dollars_a_step, ",.3g"),
        "$/M response tokens": _shown(size.dollars_per_million_response_tokens, ".3g"),
    }
    return {
        "cluster": size.cluster,
        "devices": str(size.num_devices),
        "seconds a step": _shown(size.seconds, ".2f"),
        "tokens/s": _shown(size.tokens_per_second, ",.0f"),
        "MFU": _shown(size.utilisation, ".1%"),
        **(dollars if has_prices else {}),
        "device-hours a step": _shown(size.device_hours, ".3f"),
        "fullest device": _shown(size.fullest_share, ".1%"),
        "note": size.refused or ("nearly full" if (size.fullest_share or 0.0) > NEARLY_FULL else ""),
    }


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
