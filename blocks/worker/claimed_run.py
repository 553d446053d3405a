"""A flow run that a worker has claimed: no other worker can start it, and its devices are locked."""

from dataclasses import dataclass
from typing import Any, Self

from prefect_rlhf.blocks.lease import require_ray
from prefect_rlhf.blocks.lease_book import Busy, Holder, LeasedMesh
from prefect_rlhf.blocks.lease_files import FileLock
from prefect_rlhf.blocks.worker.configuration import GpuMeshConfiguration
from prefect_rlhf.blocks.worker.origin import Origin
from prefect_rlhf.files.engine_builds import check_kind
from prefect_rlhf.placement.devices.lease import Lease


@dataclass(slots=True)
class TakenRun:
    """A flow run's lock and its locked devices; a dry run has no devices.

    The lock is held from before the search for devices until the server has every record of the end. Therefore two
    workers cannot start the same run, and a run's next attempt starts only after the previous attempt is over.
    """

    configuration: GpuMeshConfiguration
    lock: FileLock
    mesh: LeasedMesh | None = None
    origin: Origin = Origin()

    @classmethod
    def take(cls, configuration: GpuMeshConfiguration) -> Self | None:
        """Lock the run, without devices; None if another worker or the run's previous attempt holds the lock."""
        lock = configuration.lease_book().take_run(configuration.run.id)
        return None if lock is None else cls(configuration, lock)

    def enter_queue(self, arrived: float | None, priority: int) -> FileLock | None:
        """Put the run into the queue for devices; None if another worker keeps its place there.

        A dry run gets no place: the result is None. Raises InvalidInput for a mesh that the cluster can never provide.
        """
        run = self.configuration.run
        if run.dry_run:
            return None
        return self.configuration.lease_book().enter(self.configuration.wanted, run.id, run.name, arrived, priority)

    def take_devices(self) -> Busy | None:
        """Lock the run's devices; return Busy if others hold them.

        Raises InvalidInput for an impossible mesh, for GPUs that the worker does not see, and for engines that are
        built for another kind of device. A dry run locks no devices, but an impossible mesh is refused all the same.
        """
        book, wanted = self.configuration.lease_book(), self.configuration.wanted
        if self.configuration.run.dry_run:
            book.acceptable(wanted, self.configuration.min_devices)
            return None
        require_ray(book.cluster)
        if self.configuration.has_own_engines:
            check_kind(self.configuration.kind)
        holder = Holder.now(self.configuration.run.id, self.configuration.run.name)
        answer = book.acquire(wanted, holder, self.configuration.min_devices)
        if isinstance(answer, Busy):
            return answer
        self.mesh = answer
        self.configuration.environment(self.lease)  # before a process starts, refuse GPUs that the worker does not see
        return None

    def leave_origin(self) -> dict[str, Any]:
        """Return the labels that record the run's origin, and write its attempt into its lock file."""
        self.origin = Origin.leave(self.lock)
        return dict(self.origin.labels())

    @property
    def lease(self) -> Lease:
        """The lease of the locked devices, or of the mesh that a dry run would lease.

        Raises InvalidInput for an impossible mesh.
        """
        if self.mesh is not None:
            return self.configuration.lease(self.mesh.id, self.mesh.mesh)
        book = self.configuration.lease_book()
        return self.configuration.lease("dry-run", book.candidates(self.configuration.wanted)[0])

    @property
    def devices(self) -> tuple[int, ...]:
        """Descriptors that hold the devices."""
        return self.mesh.descriptors if self.mesh else ()

    def release_devices(self) -> None:
        """Free the devices that this process holds."""
        if self.mesh is not None:
            self.mesh.release()

    def release(self) -> None:
        """Free the devices and the run. Idempotent."""
        self.release_devices()
        self.lock.release()


def can_be_taken(configuration: GpuMeshConfiguration) -> bool:
    """Whether the run and its devices could be locked now; neither stays locked."""
    taken = TakenRun.take(configuration)
    if taken is None:
        return False
    try:
        return taken.take_devices() is None
    finally:
        taken.release()
