"""HybridFlow, figure 15: how many tensor-parallel shards generate fastest after training with p 1, t 8, d 2."""

from dataclasses import replace

import pytest

from prefect_rlhf.placement.cost.call import call_cost
from prefect_rlhf.placement.cost.call_bytes import rows_that_fit, static_bytes
from prefect_rlhf.placement.cost.datasheet import DatasheetTimes
from prefect_rlhf.placement.cost.execution import EARLY_VLLM, Execution
from prefect_rlhf.placement.cost.hardware import DATASHEETS, NETWORKS, Hardware
from prefect_rlhf.placement.cost.sizes import ModelSizes
from prefect_rlhf.placement.cost.workload import CallWork, Workload
from prefect_rlhf.placement.errors import InvalidInput
from prefect_rlhf.placement.model import KNOWN_SHAPES
from prefect_rlhf.placement.strategy import Strategy

HARDWARE = Hardware(DATASHEETS["a100-80"], 8, NETWORKS["infiniband-200"])
PROMPTS = CallWork("generate", 1024, Workload.fixed(1024, 1024, cuda_graphs=False))  # vLLM 0.3 without graphs
TRAINING = Execution(Strategy(dp=2, tp=8), 2, 8)
USABLE = 0.9  # vLLM's default share of a device


def seconds(sizes, tp):
    """Transition and generation on 16 devices that hold all four models of PPO; the cache takes what is left."""
    times = DatasheetTimes.of(sizes, HARDWARE)
    execution = Execution(Strategy(16 // tp, tp), 2, 8, rules=EARLY_VLLM)
    trained, frozen = (static_bytes(TRAINING, sizes, on).static for on in (True, False))
    generating = static_bytes(execution, sizes, False).static
    room = USABLE * HARDWARE.device.memory_bytes - 2 * trained - 2 * frozen - generating
    transition = times.links.seconds((8 - tp) / (8 * tp) * sizes.num_parameters * sizes.item, "node")  # its table 2
    fitting = replace(execution, rows_at_once=rows_that_fit(room, PROMPTS, execution, sizes))
    return transition + call_cost(PROMPTS, fitting, times).total


@pytest.mark.parametrize(("model", "best"), [("llama-7b", 2), ("llama-13b", 4)])
def test_generation_is_fastest_with_the_shards_that_hybridflow_found(model, best):
    """Fewer shards leave less room for the cache; more make each replica's host and reduces work on more rows."""
    sizes = ModelSizes.of_shape(KNOWN_SHAPES[model])
    found = {tp: seconds(sizes, tp) for tp in (1, 2, 4, 8)}
    assert min(found, key=lambda tp: found[tp]) == best


def test_a_cache_that_holds_no_row_is_refused_in_one_line():
    sizes = ModelSizes.of_shape(KNOWN_SHAPES["llama-7b"])
    with pytest.raises(InvalidInput, match="raise tp or pp, or take more devices"):
        rows_that_fit(1e6, PROMPTS, Execution(Strategy(16)), sizes)
