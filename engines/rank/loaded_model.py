"""A model instance in a rank's memory: its engine, and the weight version that it is known to hold."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from prefect_rlhf.engines.commands import BuildCommand, Digest
from prefect_rlhf.engines.engine import Engine
from prefect_rlhf.engines.weights.fingerprint import Factors, Sample, digest
from prefect_rlhf.errors.errors import StaleWeights
from prefect_rlhf.placement.plan import OffloadPart


@dataclass(slots=True)
class LoadedModel:
    """An engine with the version its weights are labelled with, and a sample of them taken when they were labelled."""

    engine: Engine
    command: BuildCommand  # that built it
    version: int = 0
    offloaded: set[OffloadPart] = field(default_factory=set)
    is_empty: bool = False  # reloaded without weights, which a reallocation brings
    _fingerprint_seconds: float = 0.0  # since the last report
    _sample: Sample | None = None  # of the weights as they were labelled
    _factors: Factors = field(default_factory=Factors)

    def label(self, version: int) -> Digest:
        """Label the weights as `version`; return their whole digest, and keep a sample of the weights."""
        began = time.perf_counter()
        self.version, self.is_empty = version, False
        whole = self.digest()
        self._sample = Sample(self.engine.weights(), f"{self.command.instance.name} v{version}", self._factors)
        self._fingerprint_seconds += time.perf_counter() - began
        return whole

    def digest(self) -> Digest:
        """Return the whole digest of the weights as they are now."""
        return Digest.of(digest(self.engine.weights(), self._factors))

    def offload(self, part: OffloadPart, copies: bool = True) -> int:
        """Move a part to host memory, or drop it; return the bytes copied."""
        self.offloaded.add(part)
        return self.engine.offload(part) if copies else self.engine.offload(part, copies=False)

    def reload(self, part: OffloadPart, copies: bool = True) -> int:
        """Restore an offloaded part, or allocate its memory only; return the bytes copied."""
        bytes_copied = self.engine.reload(part) if copies else self.engine.reload(part, copies=False)
        self.offloaded.discard(part)
        self.is_empty = not copies if part != "optimizer" else self.is_empty
        return bytes_copied

    def require(self, version: int | None, doing: str, part: OffloadPart | None = None) -> None:
        """Raise StaleWeights unless these weights are labelled `version` and are unchanged since they were labelled.

        A call that needs the optimizer too states it by `part`.
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
        assert self._sample is not None  # a model is labelled when it is built
        changed = self._sample.changed(self.engine.weights())
        self._fingerprint_seconds += time.perf_counter() - began
        if changed:
            content = f"but {changed[0]} was written since that version was fingerprinted"
            raise StaleWeights(f"{doing}: {name} is labelled v{self.version}, {content}")

    def require_on_device(self, doing: str) -> None:
        """Raise StaleWeights if the instance is in host memory: the memory that its weights had may be another's."""
        if self._weights_are_away:
            raise StaleWeights(f"{doing}: {self.command.instance.name} is offloaded; reload it before it is written")

    @property
    def _weights_are_away(self) -> bool:
        return not self.offloaded.isdisjoint(("all", "weights"))

    def take_fingerprint_seconds(self) -> float:
        """Return the seconds spent on fingerprints since the last call of this."""
        seconds, self._fingerprint_seconds = self._fingerprint_seconds, 0.0
        return seconds
