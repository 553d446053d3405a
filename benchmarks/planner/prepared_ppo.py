"""PPO's run as it is before its first step: planned, certified and predicted, with nothing started."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prefect_rlhf.blocks.lease import leased_devices
from prefect_rlhf.flows.forms.options import RunOptions
from prefect_rlhf.flows.ppo import ppo
from prefect_rlhf.flows.training.run import PreparedRun, prepare


def prepared_ppo(parameters: Mapping[str, Any]) -> PreparedRun:
    """Prepare PPO with these parameters on the devices that are leased to this process."""
    options, arguments = RunOptions.split(ppo.validate_parameters(dict(parameters)))
    with leased_devices() as lease:
        return prepare(ppo.algorithm, arguments, options, lease)
