"""Chooses a gang: in this process for one rank, a process per rank for more, and Ray for several nodes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import torch

from prefect_rlhf.engines.gang.in_process import InProcessGang
from prefect_rlhf.engines.gang.local import LocalGang
from prefect_rlhf.engines.gang.processes import flight_recorder
from prefect_rlhf.engines.gang.processes.messages import GangSettings
from prefect_rlhf.engines.gang.processes.preload import modules_of
from prefect_rlhf.engines.gang.protocol import AnyRank, Gang
from prefect_rlhf.engines.gang.ray.ray_gang import RayGang
from prefect_rlhf.files.gpus import PCI_ORDER, only_gpus
from prefect_rlhf.files.hub.session import WISH, wish
from prefect_rlhf.files.modules import IN_RANK
from prefect_rlhf.placement.devices.mesh import Backend
from prefect_rlhf.placement.engine_traits import TRAITS
from prefect_rlhf.placement.plan import EngineKind

RANK_ENVIRONMENT: Mapping[str, str] = MappingProxyType(
    {
        "GLOO_SOCKET_IFNAME": "lo",  # otherwise gloo resolves the host's own name
        "HF_HUB_OFFLINE": "1",  # of libraries; what the Hub has, our own code requests
        "TOKENIZERS_PARALLELISM": "false",
    }
)
NO_GPU: Mapping[str, str] = MappingProxyType({"CUDA_VISIBLE_DEVICES": ""})
"""Megatron and vLLM look for GPUs through torch themselves, and would use them in a run on CPU."""
FORK_ENVIRONMENT: Mapping[str, str] = MappingProxyType(
    {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", IN_RANK: "1"}
)
"""For ranks that are processes of their own; thread pools do not survive the fork of a rank."""


MINUTE = 60.0
START_SECONDS, RANK_START_SECONDS = 120.0, 30.0
"""Time limit for each phase of a start: a fixed part, and a part per rank on a node, as ranks share its disk."""


def open_gang(
    ranks_of_nodes: Sequence[int],
    environment: Mapping[str, str] | None = None,
    *,
    rank_factory: Callable[[int, int], AnyRank],
    device: Backend | None = None,
    engines: Iterable[EngineKind] = TRAITS,
    through_ray: bool = False,
    say: Callable[[str], object] = print,
    shared: Path | None = None,
    node_devices: Sequence[str] = (),
    in_process: bool = True,
    gpus: Sequence[int] | None = None,
    longest_call_seconds: float | None = None,
    start_seconds: float | None = None,
    records: Path | None = None,
) -> Gang[AnyRank]:
    """Start the given number of ranks on each node: a single rank in this process, more ranks in a process each.

    Without `in_process`, a single rank is a process too: it leaves nothing behind in this process.
    The node is this machine. With `through_ray`, the nodes are those of the Ray cluster at RAY_ADDRESS, and all of them
    need access to the folder `shared`. `RayGang` documents `node_devices`, the messages to `say` and the errors. Only
    `engines` are imported in advance, so other engines need not be installed.

    `environment` is added to the ranks' environment. The caller closes the gang. The default device is CUDA if it is
    available. `gpus` are the numbers of the ranks' GPUs in this process's list, by default the first; Ray assigns GPUs
    itself. Each phase of the start may take `start_seconds`, by default START_SECONDS and RANK_START_SECONDS for each
    rank of a node. Collectives of ranks fail a minute after `longest_call_seconds`, the largest deadline of a call. If
    a call passes its deadline, each rank process writes its latest collectives to the folder `records`. Ranks with
    GPUs are always processes of their own, because only the end of a process frees all memory of its GPU.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    ranks = {**RANK_ENVIRONMENT, WISH: wish(), **(NO_GPU if device == "cpu" else PCI_ORDER), **(environment or {})}
    if device == "cuda" and not through_ray:
        numbers = range(sum(ranks_of_nodes)) if gpus is None else gpus
        ranks |= only_gpus(numbers, os.environ.get("CUDA_VISIBLE_DEVICES"))
    if device == "cuda" and records is not None:
        ranks |= flight_recorder.environment(records)
    if in_process and device == "cpu" and not through_ray and tuple(ranks_of_nodes) == (1,):
        return InProcessGang(rank_factory, device=device, environment=ranks)
    single_threaded = {**FORK_ENVIRONMENT, **ranks}
    preload = modules_of(engines)
    settings = GangSettings(
        sum(ranks_of_nodes), rank_factory, device, environment=single_threaded, preload=preload, records=records
    )
    start_seconds = start_seconds or START_SECONDS + RANK_START_SECONDS * max(ranks_of_nodes)
    settings = replace(settings, start_seconds=start_seconds)
    if longest_call_seconds is not None:
        settings = replace(settings, collective_seconds=longest_call_seconds + MINUTE)
    if not through_ray:
        return LocalGang(settings)
    return RayGang(settings, ranks_of_nodes, say=say, shared=shared, node_devices=node_devices)
