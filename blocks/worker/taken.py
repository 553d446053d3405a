"""A flow run that a worker has taken: nobody else may start it, and its devices are held."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from prefect_rlhf.blocks.lease import require_ray
from prefect_rlhf.blocks.lease_book import Busy, Holder, LeasedMesh
from prefect_rlhf.blocks.lease_files import FileLock
from prefect_rlhf.blocks.worker.configuration import GpuMeshConfiguration
from prefect_rlhf.blocks.worker.origin import Origin
from prefect_rlhf.placement.lease import Lease


@dataclass(slots=True)
class TakenRun:
    """The lock of a flow run and the devices that were locked for it; none are for a dry run.

    The lock is held from before the run's devices are looked for until all is told to the server: so two workers do
    not start one run, and the next attempt of a run starts when the last one is over.
    """

    configuration: GpuMeshConfiguration
    lock: FileLock
    mesh: LeasedMesh | None = None
    origin: Origin = Origin()

    @classmethod
    def take(cls, configuration: GpuMeshConfiguration) -> Self | None:
        """Take the run alone, without devices; None while somebody has it, another worker or its last attempt."""
        lock = configuration.lease_book().take_run(configuration.run.id)
        return None if lock is None else cls(configuration, lock)

    def enter_queue(self, arrived: float | None) -> FileLock | None:
        """Give the run its place among those that wait for devices; None where another worker keeps it for it.

        A dry run needs none. Raises InvalidInput for a mesh that cannot be.
        """
        run = self.configuration.run
        if run.dry_run:
            return None
        return self.configuration.lease_book().enter(self.configuration.wanted, run.id, run.name, arrived)

    def take_devices(self) -> Busy | None:
        """Lock the devices of the run; Busy when others have them. Raises InvalidInput for a mesh that cannot be.

        A dry run locks none, and is refused all the same what the run would be.
        """
        book, wanted = self.configuration.lease_book(), self.configuration.wanted
        if self.configuration.run.dry_run:
            book.acceptable(wanted, self.configuration.min_devices)
            return None
        require_ray(book.cluster)
        holder = Holder.now(self.configuration.run.id, self.configuration.run.name)
        answer = book.acquire(wanted, holder, self.configuration.min_devices)
        if isinstance(answer, Busy):
            return answer
        self.mesh = answer
        return None

    def leave_origin(self) -> dict[str, Any]:
        """Return the labels that say where this run is taken; its lock file says so, too."""
        self.origin = Origin.leave(self.lock)
        return dict(self.origin.labels())

    @property
    def lease(self) -> Lease:
        """The lease of the devices; of a dry run, of the mesh that it would get. Raises InvalidInput without any."""
        if self.mesh is not None:
            return self.configuration.lease(self.mesh.id, self.mesh.mesh)
        book = self.configuration.lease_book()
        return self.configuration.lease("dry-run", book.candidates(self.configuration.wanted)[0])

    @property
    def devices(self) -> tuple[int, ...]:
        """Descriptors that hold the devices."""
        return self.mesh.descriptors if self.mesh else ()

    def release_devices(self) -> None:
        """Free the devices, as far as this process holds them."""
        if self.mesh is not None:
            self.mesh.release()

    def release(self) -> None:
        """Free the devices and the run. Idempotent."""
        self.release_devices()
        self.lock.release()


def can_be_taken(configuration: GpuMeshConfiguration) -> bool:
    """Return whether the run and its devices can be had now; holds neither."""
    taken = TakenRun.take(configuration)
    if taken is None:
        return False
    try:
        return taken.take_devices() is None
    finally:
        taken.release()
