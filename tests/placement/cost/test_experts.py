"""Mixtures of experts: what a token costs, reads, sends and keeps, worked out by hand."""

from dataclasses import replace
from itertools import combinations, product
from statistics import mean

import pytest

from prefect_rlhf.placement.cost.call import call_cost
from prefect_rlhf.placement.cost.call_bytes import call_bytes, static_bytes
from prefect_rlhf.placement.cost.datasheets.hardware import Efficiency, Hardware, Network
from prefect_rlhf.placement.cost.datasheets.kinds import DATASHEETS
from prefect_rlhf.placement.cost.execution import Execution
from prefect_rlhf.placement.cost.sizes import ModelSizes
from prefect_rlhf.placement.cost.times.roofline import DatasheetTimes
from prefect_rlhf.placement.cost.workload import CallWork, Workload
from prefect_rlhf.placement.devices.strategy import Strategy
from prefect_rlhf.placement.models.known_models import KNOWN_SHAPES

MIXTRAL = ModelSizes.of_shape(KNOWN_SHAPES["mixtral-8x7b"])
LAYERS, HIDDEN, INNER, VOCABULARY = 32, 4096, 14336, 32000
EXPERT, ROUTER = 3 * HIDDEN * INNER, 8 * HIDDEN
ATTENTION = 2 * HIDDEN * (4096 + 1024)
EXPERTS = LAYERS * 8 * EXPERT
OTHERS = LAYERS * (ATTENTION + ROUTER + 2 * HIDDEN) + HIDDEN + 2 * VOCABULARY * HIDDEN
TWO_NODES = Hardware(
    DATASHEETS["h100"], 8, Network("fast", 400e9, latency_seconds=0.0), Efficiency(1, 1, 1, 0, 0, 0, 0, 0)
)
"""Perfect kernels; each device has 50 GB/s of its node's network and 450 to its neighbours."""


def cost(work, execution, sizes=MIXTRAL):
    return call_cost(work, execution, DatasheetTimes.of(sizes, TWO_NODES))


def test_it_is_made_of_experts_and_of_what_every_token_passes():
    assert MIXTRAL.num_parameters == EXPERTS + OTHERS


def test_training_takes_six_flops_of_each_weight_that_a_token_passes():
    """Attention, the router and two experts of eight; scores of 1024 tokens besides."""
    tokens = 64 * 1024
    weights = LAYERS * (ATTENTION + ROUTER + 2 * EXPERT)
    flops = 6 * tokens * (weights + LAYERS * 4096 * 1024)
    scalar = ModelSizes.of_shape(KNOWN_SHAPES["mixtral-8x7b"], head="scalar")
    found = cost(CallWork("train_step", 64, Workload.fixed(512, 512)), Execution(Strategy()), scalar)
    assert found.compute == pytest.approx(flops / 989e12, rel=1e-12)


@pytest.mark.parametrize(("experts", "per_token", "tokens"), [(4, 1, 4), (4, 2, 3), (5, 3, 2)])
def test_as_many_experts_are_needed_as_all_choices_have_on_average(experts, per_token, tokens):
    choices = product(combinations(range(experts), per_token), repeat=tokens)
    needed = mean(len(set().union(*chosen)) for chosen in choices)
    sizes = replace(MIXTRAL, num_experts=experts, experts_per_token=per_token)
    assert sizes.experts_touched(tokens) == pytest.approx(needed)


def test_decoding_a_row_reads_two_experts_per_layer():
    found = cost(CallWork("generate", 1, Workload.fixed(1, 100)), Execution(Strategy()))
    read = LAYERS * (ATTENTION + ROUTER + 2 * EXPERT) + VOCABULARY * HIDDEN
    assert found.total == pytest.approx(100 * 2 * read / 3.35e12, rel=0.02)


def test_replicas_that_share_experts_read_their_own_for_all_rows():
    """Eight rows on each of eight devices: alone each needs 7.2 experts of eight, together each has one."""
    work = CallWork("generate", 64, Workload.fixed(1, 100))
    alone, shared = (cost(work, Execution(Strategy(8, ep=ep), 1, 8)) for ep in (1, 8))
    apart = 8 * (1 - 0.75**8) - (1 - 0.75**64)
    read = 100 * LAYERS * apart * EXPERT * 2 / 3.35e12
    assert alone.memory_traffic - shared.memory_traffic == pytest.approx(read, rel=0.02)
    assert alone.ep_communication == 0 < shared.ep_communication


def test_tokens_go_to_their_experts_and_back():
    """In a layer's forward and in its backward. Half of the 16 devices are on the other node: 50 GB/s each."""
    work = CallWork("train_step", 16, Workload.fixed(512, 512))
    found = cost(work, Execution(Strategy(16, ep=16), 2, 8))
    copies = 1024 * 2 * HIDDEN * 2  # bytes, of a row's tokens for two experts each
    assert found.ep_communication == pytest.approx(LAYERS * 4 * copies / 2 / 50e9)
    near = cost(work, Execution(Strategy(16, ep=8), 2, 8))
    assert near.ep_communication == pytest.approx(LAYERS * 4 * copies * 7 / 8 / 450e9)


def test_with_vllm_the_devices_of_a_replica_share_its_copies():
    """Two replicas of tp 4: seven eighths of a quarter of the copies leave a device, in each of 100 steps of 8 rows."""
    execution = Execution(Strategy(2, 4, ep=2), 1, 8, engine="vllm")
    found = cost(CallWork("generate", 16, Workload.fixed(0, 100)), execution)
    copies = 8 * 2 * HIDDEN * 2 / 4
    assert found.ep_communication == pytest.approx(100 * LAYERS * 2 * copies * 7 / 8 / 450e9)


def test_gradients_of_experts_are_summed_over_the_replicas_that_hold_the_same():
    """Of 16 replicas in twos of eight on a node: pairs over the network at 50 GB/s for experts, 400 for all else."""
    found = cost(CallWork("train_step", 16, Workload.fixed(512, 512)), Execution(Strategy(16, ep=8), 2, 8))
    others, experts = 15 / 16 * 6 * OTHERS / 400e9, 1 / 2 * 6 * (EXPERTS / 8) / 50e9
    assert found.dp_communication == pytest.approx(others + experts)


def test_states_of_experts_are_shared_by_the_replicas_that_hold_the_same():
    """18 bytes a parameter, 12 of them shared: all else by eight replicas, a quarter of the experts by two."""
    found = static_bytes(Execution(Strategy(8, ep=4)), MIXTRAL, trained=True)
    assert found.weights == 2 * (OTHERS + EXPERTS // 4)
    assert found.gradients == 4 * (OTHERS + EXPERTS // 4)
    assert found.optimizer == 12 * OTHERS // 8 + 12 * (EXPERTS // 4) // 2


def test_a_token_keeps_as_many_feed_forward_layers_as_it_has_experts():
    """Another expert: gate, up, their product and silu(gate), and the copy of the hidden state that it gets."""
    work = CallWork("train_step", 4, Workload.fixed(512, 512))
    one, two = (
        call_bytes(work, Execution(Strategy()), replace(MIXTRAL, experts_per_token=count)).activations
        for count in (1, 2)
    )
    assert two - one == 4 * 1024 * LAYERS * (4 * INNER + HIDDEN) * 2


def test_the_fullest_device_of_divided_experts_may_have_half_as_many_tokens_again():
    """A token's copies, and the inputs of its experts' products, are kept in each of the layers of a stage.

    Gate, up, their product and silu(gate), of two experts; while the last layer's backward computes, also the outputs
    of the experts and their copies, and four tensors of the products' gradients.
    """
    tokens = 8 * 1024
    work = CallWork("train_step", 64, Workload.fixed(512, 512))
    execution = Execution(Strategy(dp=8, ep=8), micro_batches=1)
    kept = LAYERS * 2 * (HIDDEN + 4 * INNER)
    at_once = 2 * 2 * HIDDEN + 2 * 4 * INNER
    scalar = ModelSizes.of_shape(KNOWN_SHAPES["mixtral-8x7b"], head="scalar")
    found = call_bytes(work, execution, scalar)
    assert found.expert_imbalance == pytest.approx(0.5 * tokens * (kept + at_once) * 2, rel=1e-3)
    assert found.active == pytest.approx(found.activations + found.working + found.rows + found.expert_imbalance)


def test_undivided_experts_are_balanced_and_dense_models_have_no_experts():
    dense = ModelSizes.of_shape(KNOWN_SHAPES["llama-7b"])
    for kind in ("generate", "inference", "train_step"):
        work = CallWork(kind, 64, Workload.fixed(512, 512))
        assert call_bytes(work, Execution(Strategy(dp=4, tp=2)), MIXTRAL).expert_imbalance == 0
        assert call_bytes(work, Execution(Strategy(dp=8)), dense).expert_imbalance == 0
        divided = Execution(Strategy(dp=4, tp=2, ep=2))
        more = replace(work, workload=replace(work.workload, expert_imbalance=2.0))
        counted, twice = (call_bytes(each, divided, MIXTRAL).expert_imbalance for each in (work, more))
        assert 0 < counted < twice
