"""Bytes that the models of a run keep on two CPU devices, by its plan's certificate; nothing is run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prefect_rlhf.blocks.cluster import Cluster
from prefect_rlhf.blocks.lease import dry_lease
from prefect_rlhf.flows.algorithm.rlhf_flow import find_flow
from prefect_rlhf.flows.forms.options import RunOptions
from prefect_rlhf.flows.training.run import prepare


def resident_bytes(algorithm: str, parameters: Mapping[str, Any]) -> int:
    """Add up, over devices, the most that weights, gradients, optimizers and caches hold at any moment of a run."""
    flow = find_flow(algorithm)
    options, arguments = RunOptions.split(flow.validate_parameters({**parameters, "dry_run": True}))
    prepared = prepare(flow.algorithm, arguments, options, dry_lease(Cluster(devices_per_node=2).shape))
    return sum(num_bytes for _, num_bytes in prepared.chosen.certificate.most_resident)
