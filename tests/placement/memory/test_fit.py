"""Whether plans fit: refusals say what fills the device and which changes help, and the changes do help."""

import json
import pickle
from dataclasses import replace

import pytest

from prefect_rlhf.errors.errors import InvalidInput, PlanDoesNotFit
from prefect_rlhf.flows.commands.flags import read_parameters
from prefect_rlhf.placement.devices.mesh import ClusterShape
from prefect_rlhf.placement.memory.certificate import certify_plan
from prefect_rlhf.placement.memory.fit import check_fits, longest_rows
from prefect_rlhf.placement.memory.remedies import remedies
from prefect_rlhf.placement.memory.savings import Savings
from prefect_rlhf.placement.models.known_models import KNOWN_SHAPES
from prefect_rlhf.placement.plan import ExecutionPlan
from prefect_rlhf.placement.planner.preset_plan import preset
from prefect_rlhf.placement.plans.check import check_plan
from prefect_rlhf.placement.plans.stated_words import with_words
from tests.support.strategies import GIB, SMOLLM2, TWO_DEVICES, dpo, on, ppo

GRAPH = ppo()
PLAN = preset("flattening", GRAPH, TWO_DEVICES, TWO_DEVICES.whole)


def on_devices_of(mebibytes: int):
    return replace(PLAN, cluster=ClusterShape("small", 1, 2, mebibytes << 20))


def refused(mebibytes: int) -> PlanDoesNotFit:
    with pytest.raises(PlanDoesNotFit) as error:
        check_fits(on_devices_of(mebibytes), GRAPH, longest_rows(GRAPH, 64), "cpu")
    return error.value


def test_a_plan_that_fits_is_left_alone():
    work = longest_rows(GRAPH, 1024)
    assert Savings(GRAPH, work, "cuda").least(PLAN) is PLAN
    assert check_fits(PLAN, GRAPH, work, "cuda").fits


def test_the_refusal_names_device_peak_node_and_memory_use():
    """One line with the numbers and the smallest change; the report begins with it, and its bytes add up."""
    error = refused(16)
    (first,), rest = str(error).splitlines(), error.report.splitlines()
    assert first.startswith("plan flattening: memory of n0:0: got '")
    assert " MiB at actor_train_step@1', expected at most 16.00 MiB; it fits with -p placement." in first
    assert rest[0] == "What would make it fit:" and rest[1].startswith("  -p placement.")
    held = [float(line.split()[0]) for line in rest if line.startswith("  ") and ": " in line and "peak" not in line]
    assert held == sorted(held, reverse=True)
    assert sum(held) == pytest.approx(float(first.partition("got '")[2].split()[0]), abs=0.02 * len(held))


def test_the_refusal_has_a_machine_readable_form_that_survives_another_process():
    error = pickle.loads(pickle.dumps(refused(16)))
    details = json.loads(error.details)
    assert details["certificate"]["fits"] is False
    assert details["remedies"][0]["fits"] is True
    assert isinstance(error, InvalidInput)
    assert error.report == refused(16).report


@pytest.mark.parametrize("mebibytes", [8, 10, 12, 16, 20])
def test_proposed_remedies_are_legal_and_fit(mebibytes):
    """The words of the flags, put into the plan, give the certificate that the refusal shows."""
    plan, workload = on_devices_of(mebibytes), longest_rows(GRAPH, 64)
    for remedy in remedies(plan, GRAPH, workload, "cpu"):
        changed = with_words(plan, GRAPH, words_of(remedy.change))
        check_plan(changed, GRAPH, changed.cluster.whole)
        after = certify_plan(changed, GRAPH, workload, "cpu")
        assert after == remedy.certificate and after.fits


def words_of(flags: str) -> dict[str, dict[str, object]]:
    """The words that the flags of a remedy state, as a command line reads them."""
    return read_parameters(None, flags.replace("-p ", "").split())["placement"]


def test_a_model_too_large_for_any_change_is_reported():
    error = refused(1)
    assert json.loads(error.details)["remedies"] == []
    assert "no plan fits these devices: critic_train_step needs " in str(error)


def test_rows_are_as_long_as_the_run_allows():
    """Without a generate every token may be one that is scored."""
    assert longest_rows(dpo(), 100).longest == 100
    calls = tuple(replace(call, max_new_tokens=30) if call.name == "actor_generate" else call for call in GRAPH)
    workload = longest_rows(replace(GRAPH, calls=calls), 100)
    assert (workload.prompts.longest, workload.responses.longest) == (70, 30)


def test_the_demos_models_fit_the_demos_devices():
    """What the two-device mesh of a small machine is used for must not be refused."""
    graph = replace(ppo(), models=tuple(replace(model, shape=SMOLLM2) for model in ppo().models))
    cluster = ClusterShape("embedded", 1, 2, 8 * GIB)
    plan = preset("flattening", graph, cluster, cluster.whole, max_sequence_length=64, backend="cpu")
    assert not any(placement.offload != "none" for _, placement in plan.placements)


def test_experts_that_every_replica_has_may_be_shared_out():
    """Eight replicas of a mixture of 30B: 61 GB of weights and 122 of gradients on each, or a share of them."""
    graph = dpo()
    mixtures = tuple(replace(model, shape=KNOWN_SHAPES["qwen3-30b-a3b"]) for model in graph.models)
    graph = replace(graph, models=mixtures, calls=tuple(replace(call, num_rows=16) for call in graph))
    placements = tuple((call.name, on("n0:0-7", "megatron", dp=8)) for call in graph)
    plan, work = ExecutionPlan("mine", ClusterShape("eight", 1, 8, 180 * GIB), placements), longest_rows(graph, 128)
    best = remedies(plan, graph, work, "cuda")[0]
    assert "-p placement.actor_train_step.ep=" in best.change and best.certificate.fits
