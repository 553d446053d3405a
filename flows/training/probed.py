"""Speeds measured before a search, unless the run it continues has them or they are stored."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.flows.hardware.probes import is_uniform, machine_key, probed_speeds, stored_speeds, unprobed
from prefect_rlhf.flows.hardware.profiles import measured_sources
from prefect_rlhf.flows.training.log import log_info
from prefect_rlhf.flows.training.request import RunRequest
from prefect_rlhf.flows.training.spec.plan_choice import is_searched
from prefect_rlhf.placement.cost.speeds import KnownSpeeds
from prefect_rlhf.placement.cost.times.contradiction import contradictions
from prefect_rlhf.placement.models.model import Dtype

SPEEDS = "speeds.json"
"""The run folder's file with the speeds that its plan was chosen by, so that a resumed run keeps its plan."""


def with_speeds(request: RunRequest) -> RunRequest:
    """Return the request with the speeds of its devices, if they are known or a probe is due."""
    if not is_uniform(request.lease):
        return request
    try:
        key = machine_key(request.lease)
    except InvalidInput:  # an unknown GPU: a given plan runs without predictions, and a search names the device
        return request
    known = earlier_speeds(request, key)
    if known is None:
        known = stored_speeds(key, log_info)
        if _is_due(request, known):
            known = probed_speeds(request.lease, dtypes(request), log_info)
    return replace(request, speeds=known)


def awaits_probe(request: RunRequest) -> bool:
    """Whether a search for this run should probe first: it holds devices that no profile and no probe has measured."""
    if not _may_probe(request):
        return False
    key = machine_key(request.lease)
    return earlier_speeds(request, key) is None and _is_due(request, stored_speeds(key, log_info))


def _may_probe(request: RunRequest) -> bool:
    """Whether a run searches a plan for devices that it holds and that are alike."""
    spec, leased = request.spec, request.lease
    return is_searched(spec.plan) and not spec.dry_run and bool(leased.devices) and is_uniform(leased)


def _is_due(request: RunRequest, stored: KnownSpeeds | None) -> bool:
    if not _may_probe(request) or not unprobed(stored, dtypes(request)):
        return False
    return not measured_sources(request.graph.models, request.lease).profiles


def contradicted_profiles(request: RunRequest) -> Iterator[str]:
    """Yield a log line for each profile in use that the probe of its devices contradicts."""
    sources, speeds = request.cost_sources, request.speeds
    probed = {each.dtype for each in speeds.by_dtype} if speeds else set()
    for profile in sources.profiles:
        found = contradictions(profile, sources.nodes[0]) if profile.dtype in probed else []
        if found:
            yield (
                f"profile and probe of these devices contradict each other: {'; '.join(found)}. The run uses the "
                "profile. prefect-rlhf profile measures it again; prefect-rlhf profile --forget removes the probe"
            )


def dtypes(request: RunRequest) -> tuple[Dtype, ...]:
    """Return the compute formats of the models."""
    return tuple(dict.fromkeys(model.dtype for model in request.graph.models))


def earlier_speeds(request: RunRequest, key: str) -> KnownSpeeds | None:
    """Return the speeds of the run that this run continues; None if that was another machine or other software."""
    if request.checkpoint is None:
        return None
    file = request.checkpoint.folder.parent.parent / SPEEDS
    if not file.is_file():
        return None
    try:
        known = KnownSpeeds.from_json(file.read_bytes(), str(file))
    except (InvalidInput, OSError) as error:
        log_info(f"the speeds of the resumed run are not known ({error}), so its plan may change")
        return None
    return known if known.machine == key else None
