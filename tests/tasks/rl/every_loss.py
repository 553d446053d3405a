"""Each loss of the library on made-up rows, for tests of devices."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from prefect_rlhf.tasks.rl.losses import grpo
from prefect_rlhf.tasks.rl.preference_losses import dpo, kto
from prefect_rlhf.tasks.rl.settings.offline import DPO, KTO
from prefect_rlhf.tasks.tracing.operations import Operator
from tests.tasks.rl import test_losses, test_policy_losses, test_preference_losses


def every_loss() -> Iterator[Any]:
    """Each loss of the library: the operator, its settings, an output and a batch on the host."""
    for name, (operator, algo) in test_losses.LOSSES.items():
        batch, moved = test_losses.rows()
        yield pytest.param(operator, algo, test_losses.output_of(name, batch, moved), batch, id=name)
    batch, output, _ = test_policy_losses.rows(seed=1)
    for name, algo in test_policy_losses.FAMILY.items():
        yield pytest.param(grpo, algo, output, batch, id=name)
    output, batch = test_preference_losses.made_up(seed=1)
    for name, (_, algo) in test_preference_losses.TRLS.items():
        yield pytest.param(dpo, algo, output, batch, id=f"dpo {name}")
    yield pytest.param(dpo, DPO(loss="simpo"), output, batch, id="dpo simpo")
    yield pytest.param(kto, KTO(), output, {**batch, "kl": torch.full((len(output),), 0.1)}, id="kto")


def units_of(operator: Operator) -> dict[str, str]:
    """Return the units that a loss is a mean over, if it has no default."""
    return {"mean_over": "rows"} if operator is kto else {}
