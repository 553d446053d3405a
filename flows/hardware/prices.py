"""Prices of devices in dollars per device and hour, by kind."""

from collections.abc import Iterable, Mapping

from prefect_rlhf.errors.errors import InvalidInput, Missing, NotUsed
from prefect_rlhf.placement.cost.datasheets.hardware import Datasheet, Hardware
from prefect_rlhf.placement.cost.datasheets.kinds import datasheet


def check_prices(prices: Mapping[str, float], described: Datasheet | None = None) -> dict[str, float]:
    """Return prices by the names of datasheets, or of the device `described` by hand.

    Raises InvalidInput for an unknown device, and for a device with two prices.

    >>> check_prices({"H100-SXM-80GB": 2.5})
    {'h100': 2.5}
    """
    checked: dict[str, float] = {}
    for name, dollars in prices.items():
        known = described is not None and name.lower() == described.name
        kind = name.lower() if known else datasheet(name, f"prices.{name}").name
        if kind in checked:
            raise InvalidInput(f"prices.{name}", dollars, f"a single price for {kind}")
        checked[kind] = dollars
    return checked


def dollars_per_hour(nodes: Iterable[Hardware], prices: Mapping[str, float]) -> float | None:
    """Return the hourly price of all devices of these nodes; None without prices.

    Raises Missing for a kind of device without a price.
    """
    if not prices:
        return None
    total = 0.0
    for node in nodes:
        if node.device.name not in prices:
            raise Missing(f"prices.{node.device.name}", "dollars per device and hour, such as 2.5")
        total += node.devices_per_node * prices[node.device.name]
    return total


def check_all_used(prices: Mapping[str, float], nodes: Iterable[Hardware]) -> None:
    """Raise NotUsed for the price of a device that no node has."""
    kinds = dict.fromkeys(node.device.name for node in nodes)
    for name, dollars in prices.items():
        if name not in kinds:
            raise NotUsed(f"prices.{name}", dollars, f"the devices are {', '.join(kinds)}")
