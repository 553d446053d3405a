"""A model instance in a rank's memory: its engine, and the known versions of its weights."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

from prefect_rlhf.engines.commands import BuildCommand, Digest
from prefect_rlhf.engines.engine import Engine, HasState, Shard, TrainingEngine
from prefect_rlhf.engines.weights.fingerprint import Factors, Sample, digest
from prefect_rlhf.engines.weights.followed_weights import FollowedWeights
from prefect_rlhf.errors.errors import StaleWeights
from prefect_rlhf.placement.plan import OffloadPart


@dataclass(slots=True)
class LoadedModel:
    """An engine with its weights' version, and samples of the weights from when they got this version.

    Its trained weights have `version`, its frozen weights version 0.
    """

    engine: Engine
    command: BuildCommand  # that built it
    version: int = 0
    offloaded: set[OffloadPart] = field(default_factory=set)
    is_empty: bool = False  # reloaded without weights, which a reallocation brings
    followed: FollowedWeights | None = None  # of a follower
    _fingerprint_seconds: float = 0.0  # since the last report
    _samples: dict[bool, Sample] = field(default_factory=dict)  # of frozen and of other weights as they were labelled
    _frozen: frozenset[str] = field(init=False)  # parameters
    _factors: Factors = field(default_factory=Factors)

    def __post_init__(self) -> None:
        self._frozen = self.command.frozen
        if (follows := self.command.model.follows) is not None:
            keeps_main = follows.has_main_weights(self.command.model.dtype)
            self.followed = FollowedWeights(self.engine, self._frozen, keeps_main)

    @property
    def state(self) -> HasState:
        """The part that a checkpoint stores: a follower's own weights, or the weights of an engine that trains."""
        return self.followed or cast(TrainingEngine, self.engine)

    def device_bytes(self) -> int:
        """Bytes on the device between calls."""
        return self.engine.device_bytes() + (self.followed.device_bytes() if self.followed else 0)

    def label(self, version: int, whole: bool = False) -> Digest:
        """Give the trained weights the version `version`; return their digest, and keep a sample of them.

        `whole` means that all weights were written, including frozen weights, and that the digest is of all.
        """
        began = time.perf_counter()
        self.version, self.is_empty = version, False
        for frozen in (True, False) if whole else (False,):
            shards = self._shards(frozen)
            if shards:
                key = f"{self.command.instance.name} v{0 if frozen else version}"
                self._samples[frozen] = Sample(shards, key, self._factors)
        found = self.digest(whole)
        self._fingerprint_seconds += time.perf_counter() - began
        return found

    def digest(self, whole: bool = True) -> Digest:
        """Return the weights' current digest; without `whole`, frozen weights are left out."""
        return Digest.of(digest(self.engine.weights() if whole else self._shards(frozen=False), self._factors))

    def _shards(self, frozen: bool) -> Mapping[str, Shard]:
        """Return the shards of frozen weights, or of all others."""
        shards = self.engine.weights()
        if not self._frozen and not frozen:
            return shards
        return {name: shard for name, shard in shards.items() if (name in self._frozen) == frozen}

    def offload(self, part: OffloadPart, copies: bool = True) -> int:
        """Move a part to host memory, or drop it; return the bytes copied."""
        self.offloaded.add(part)
        main = self.followed.offload(copies) if self.followed else 0
        return main + (self.engine.offload(part) if copies else self.engine.offload(part, copies=False))

    def reload(self, part: OffloadPart, copies: bool = True) -> int:
        """Restore an offloaded part, or only allocate its memory; return the bytes copied."""
        bytes_copied = self.engine.reload(part) if copies else self.engine.reload(part, copies=False)
        bytes_copied += self.followed.reload() if self.followed else 0
        self.offloaded.discard(part)
        self.is_empty = not copies if part != "optimizer" else self.is_empty
        return bytes_copied

    def require(self, version: int | None, doing: str, part: OffloadPart | None = None) -> None:
        """Raise StaleWeights unless these weights have version `version` and have not changed since they got it.

        A call that also needs the optimizer says so by `part`.
        """
        name = self.command.instance.name
        if self._weights_are_away:
            raise StaleWeights(f"{doing}: {name} is offloaded; its edge names weights v{version}")
        if part in self.offloaded:
            raise StaleWeights(f"{doing}: the {part} of {name} is offloaded")
        if self.is_empty:
            raise StaleWeights(f"{doing}: {name} was reloaded without weights, and was not written since")
        if version is not None and version != self.version:
            raise StaleWeights(f"{doing}: {name} holds weights v{self.version}, its edge names v{version}")
        began = time.perf_counter()
        samples = self._samples.items()
        changed = [name for frozen, sample in samples for name in sample.changed(self._shards(frozen))]
        self._fingerprint_seconds += time.perf_counter() - began
        if changed:
            content = f"but {changed[0]} was written since that version was fingerprinted"
            labelled = 0 if changed[0] in self._frozen else self.version
            raise StaleWeights(f"{doing}: {name} is labelled v{labelled}, {content}")

    def require_on_device(self, doing: str) -> None:
        """Raise StaleWeights if the instance is in host memory, because its device memory may be in use by another
        instance.
        """
        if self._weights_are_away:
            raise StaleWeights(f"{doing}: {self.command.instance.name} is offloaded; reload it before it is written")

    @property
    def _weights_are_away(self) -> bool:
        return not self.offloaded.isdisjoint(("all", "weights"))

    def take_fingerprint_seconds(self) -> float:
        """Return the seconds spent on fingerprints since this was last called."""
        seconds, self._fingerprint_seconds = self._fingerprint_seconds, 0.0
        return seconds
