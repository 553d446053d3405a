"""The controller's record of each weight version's content, so that no content is trusted without a check.

A rank checks the version that it holds before each call: `LoadedModel.require` in `engines/rank/loaded_model.py`.
"""

from collections.abc import Iterable, Mapping
from typing import final

from prefect_rlhf.engines.commands import FINGERPRINT_MODULUS, Digest
from prefect_rlhf.errors.errors import StaleWeights
from prefect_rlhf.placement.layout.layout import Layout
from prefect_rlhf.placement.layout.regions import Region
from prefect_rlhf.placement.models.weights import Weights
from prefect_rlhf.placement.plan import ModelInstance

Fingerprint = Mapping[str, int]
"""Parameter name -> fingerprint of the whole parameter."""


@final
class Fingerprints:
    """The fingerprint of each version that a later node may ask for, for each weight set by name."""

    def __init__(self) -> None:
        self._learned: dict[tuple[str, int], dict[str, int]] = {}

    def settle(
        self,
        instance: ModelInstance,
        weights: Iterable[Weights],
        version: int,
        digests: Mapping[int, Digest],
        layout: Layout,
    ) -> None:
        """Check that `instance` holds the content of `version`; record the content of parameters that are new.

        `layout` has the parameters that were written, and `weights` the sets that they belong to; frozen weights have
        version 0. An engine may leave parameters out; only its own are checked. Raises StaleWeights, which names the
        content's true version if it is known.
        """
        held = combined(instance, layout, digests)
        for own in weights:
            content = {parameter.name: held[parameter.name] for parameter in own.parameters if parameter.name in held}
            self._settle(instance, own.name, own.version(version), content)

    def _settle(self, instance: ModelInstance, name: str, version: int, held: Fingerprint) -> None:
        expected = self._learned.setdefault((name, version), {})
        differing = [parameter for parameter in held if expected.get(parameter, held[parameter]) != held[parameter]]
        if differing:
            learned = list(self._learned.items())  # at once: another thread may settle a version meanwhile
            versions = [v for (other, v), content in learned if other == name and held.items() <= content.items()]
            other_content = f"other content than v{version} (first in {differing[0]})"
            content = f"the content of v{max(versions)}" if versions else other_content
            raise StaleWeights(f"{instance.name} holds {content}, expected v{version} of {name}")
        expected.update(held)

    def learn(self, name: str, version: int, fingerprint: Fingerprint) -> None:
        """Record the content of a version of weights from the instance that wrote it."""
        self._learned[name, version] = dict(fingerprint)

    def content(self, name: str, version: int) -> Fingerprint:
        """Return the fingerprint of a recorded version of weights."""
        return dict(self._learned[name, version])

    def forget_before(self, version: int) -> None:
        """Drop versions that no later node needs: for each weight set, all below `version` except the newest.

        The newest is the only version of frozen weights, and the most likely content of stale weights.
        """
        learned = list(self._learned)  # at once, as above
        for name in {name for name, _ in learned}:
            older = sorted(v for other, v in learned if other == name and v < version)
            for forgotten in older[:-1]:
                self._learned.pop((name, forgotten), None)


def combined(instance: ModelInstance, layout: Layout, digests: Mapping[int, Digest]) -> Fingerprint:
    """Add up the digests of the ranks, each distinct region once.

    Raises StaleWeights if ranks that should hold copies of the same region do not agree.
    """
    copies = layout.copies.items()  # ranks with equal parts must have equal digests, so the first rank's is enough
    agree = all(digests.get(rank) == digests.get(first) for first, ranks in copies for rank in ranks)
    by_name = layout.regions_without_copies if agree else layout.regions
    read = {rank: digests[rank].by_name() for rank in digests if not agree or rank in layout.copies}
    return {name: _parameter(instance, name, regions, read) for name, regions in by_name.items()}


def _parameter(
    instance: ModelInstance, name: str, regions: Mapping[int, Region], digests: Mapping[int, Mapping[str, int]]
) -> int:
    first: dict[Region, int] = {}  # region -> the first rank that holds it
    for rank, region in sorted(regions.items()):
        if rank not in digests or name not in digests[rank]:
            raise StaleWeights(f"{instance.name}: rank {rank} gave no digest of {name}")
        twin = first.setdefault(region, rank)
        if digests[twin][name] != digests[rank][name]:
            raise StaleWeights(f"{instance.name}: ranks {twin} and {rank} hold different copies of {name}")
    return sum(digests[rank][name] for rank in first.values()) % FINGERPRINT_MODULUS
