"""The controller's memory of what each weight version is: no version's content is taken on trust."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

from prefect_rlhf.engines.commands import Digest
from prefect_rlhf.placement.errors import StaleWeights
from prefect_rlhf.placement.layout.layout import Layout, Region
from prefect_rlhf.placement.plan import ModelInstance

_MODULUS = 2**64

Fingerprint = Mapping[str, int]
"""Parameter name -> fingerprint of the whole parameter."""


def combined(instance: ModelInstance, layout: Layout, digests: Mapping[int, Digest]) -> Fingerprint:
    """Add up what the ranks hold, each distinct region once.

    Raises StaleWeights when ranks that should hold copies of the same region do not agree.
    """
    return {name: _parameter(instance, name, regions, digests) for name, regions in layout.regions.items()}


@final
class Fingerprints:
    """The fingerprint of every version of every role seen in this run."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], Fingerprint] = {}

    def settle(self, instance: ModelInstance, version: int, digests: Mapping[int, Digest], layout: Layout) -> None:
        """Check that `instance` holds the content of `version`, or learn it when nobody held that version before.

        Raises StaleWeights, naming the version that the content is when it is one.
        """
        held = combined(instance, layout, digests)
        known = self._known.setdefault((instance.role, version), held)
        differing = [name for name in known if held.get(name) != known[name]]
        if differing:
            content = self._name(instance.role, held) or f"other content than v{version} (first in {differing[0]})"
            raise StaleWeights(f"{instance.name} holds {content}, expected v{version}")

    def learn(self, role: str, version: int, fingerprint: Fingerprint) -> None:
        """What a version must be, from whoever wrote it down."""
        self._known[role, version] = fingerprint

    def content(self, role: str, version: int) -> Fingerprint:
        """The fingerprint of a version that was seen."""
        return self._known[role, version]

    def record(self, role: str, version: int) -> int | None:
        """One number for a whole version, for people to compare; None before it was seen."""
        known = self._known.get((role, version))
        return None if known is None else sum(known.values()) % _MODULUS

    def _name(self, role: str, held: Fingerprint) -> str | None:
        versions = [version for (other, version), known in self._known.items() if other == role and known == held]
        return f"the content of v{max(versions)}" if versions else None


def _parameter(instance: ModelInstance, name: str, regions: Mapping[int, Region], digests: Mapping[int, Digest]) -> int:
    first: dict[Region, int] = {}  # region -> the first rank that holds it
    for rank, region in sorted(regions.items()):
        if rank not in digests or name not in digests[rank]:
            raise StaleWeights(f"{instance.name}: rank {rank} gave no digest of {name}")
        twin = first.setdefault(region, rank)
        if digests[twin][name] != digests[rank][name]:
            raise StaleWeights(f"{instance.name}: ranks {twin} and {rank} hold different copies of {name}")
    return sum(digests[rank][name] for rank in first.values()) % _MODULUS
