"""Streamed parts: what each part waits for, the order of parts, and what becomes faster by them."""

from dataclasses import replace

import networkx as nx
import pytest

from prefect_rlhf.placement.augmented.augment import augment
from prefect_rlhf.placement.augmented.work import Transfer
from prefect_rlhf.placement.cost.datasheets.hardware import Hardware
from prefect_rlhf.placement.cost.datasheets.kinds import DATASHEETS
from prefect_rlhf.placement.cost.node import NodeCosts
from prefect_rlhf.placement.cost.sources import CostSources
from prefect_rlhf.placement.cost.workload import Workload
from prefect_rlhf.placement.devices.mesh import ClusterShape
from prefect_rlhf.placement.memory.certificate import certify_plan
from prefect_rlhf.placement.planner.preset_plan import preset
from prefect_rlhf.placement.plans.check import check_plan
from prefect_rlhf.placement.rows.partition import Part
from prefect_rlhf.placement.rows.shares import partition_of, placed_call
from prefect_rlhf.placement.schedule.schedule import schedule
from tests.support.strategies import GIB, dependency_graph, placed, ppo

pytestmark = pytest.mark.quick

FOUR = ClusterShape("four", 1, 4, 8 * GIB)
INFERENCES = ("ref_inference", "reward_inference", "critic_inference")
WORK = Workload.fixed(8, 8)
NODE = Hardware(DATASHEETS["h100"], 4)


def streamed(graph=None, **parts):
    """PPO with generation on two devices, the reference model on a third and the other two on the fourth."""
    graph = graph or ppo()
    plan = preset("flattening", graph, FOUR, FOUR.whole)
    for name, mesh in {
        "actor_generate": "n0:0-1",
        **dict(zip(INFERENCES, ("n0:2", "n0:3", "n0:3"), strict=True)),
    }.items():
        plan = placed(plan, name, mesh=mesh, dp=2 if name == "actor_generate" else 1, parts=parts.get(name, 1))
    return check_plan(plan, graph, FOUR.whole)


def waits(augmented, node):
    """The nodes that a node waits for, directly, without the order of parts."""
    return {d.node for d in augmented.node(node).dependencies if d.kind != "order"}


def test_equal_parts_wait_for_each_other_alone():
    """The second part of the reference model needs the second part of the responses, and not the third."""
    augmented = augment(ppo(), streamed(actor_generate=4, ref_inference=4), 1)
    assert waits(augmented, "transfer.ref_inference.2of4@1") == {"actor_generate.2of4@1"}
    assert "transfer.ref_inference.2of4@1" in waits(augmented, "ref_inference.2of4@1")
    before = nx.ancestors(dependency_graph(augmented), "ref_inference.2of4@1")
    assert {"actor_generate.1of4@1", "ref_inference.1of4@1"} <= before
    assert "actor_generate.3of4@1" not in before


@pytest.mark.parametrize(
    ("generate", "infer", "part", "awaited"),
    [
        (4, 2, "1of2", ["1of4", "2of4"]),
        (2, 4, "3of4", ["2of2"]),
        (8, 4, "2of4", ["3of8", "4of8"]),
    ],
)
def test_parts_that_divide_each_other_wait_for_their_own_rows(generate, infer, part, awaited):
    augmented = augment(ppo(), streamed(actor_generate=generate, ref_inference=infer), 1)
    assert waits(augmented, f"transfer.ref_inference.{part}@1") == {f"actor_generate.{each}@1" for each in awaited}


def test_other_parts_wait_for_all():
    """Twelve rows in 4 and in 6 parts; and a call without parts."""
    graph = replace(ppo(), calls=tuple(replace(each, num_rows=12) for each in ppo()))
    augmented = augment(graph, streamed(graph, actor_generate=4, ref_inference=6), 1)
    every = {f"actor_generate.{index}of4@1" for index in range(1, 5)}
    assert waits(augmented, "transfer.ref_inference@1") == every
    assert waits(augmented, "transfer.reward_inference@1") == every
    assert "transfer.ref_inference@1" in waits(augmented, "ref_inference.1of6@1")


def test_computations_and_train_steps_wait_for_all_parts():
    """So does the train_step that overwrites what the parts read."""
    parts = dict.fromkeys(("actor_generate", *INFERENCES), 2)
    augmented = augment(ppo(), streamed(**parts), 2)
    ancestors = nx.ancestors(dependency_graph(augmented), "advantages@2")
    every = {f"{name}.{index}of2@2" for name in parts for index in (1, 2)}
    assert every <= ancestors
    reallocated = augmented.node("reallocate.actor.vllm@2")
    assert {d.node for d in reallocated.dependencies if d.kind == "overwrite"} == {
        "actor_generate.1of2@1",
        "actor_generate.2of2@1",
    }


def test_two_calls_on_the_same_devices_share_the_transfer_of_a_part():
    augmented = augment(ppo(), streamed(actor_generate=4, reward_inference=4, critic_inference=2), 1)
    moves = [n.work.moves for n in augmented if isinstance(n.work, Transfer) and n.call.name == "critic_inference"]
    assert {move.keys for of_part in moves for move in of_part} == {("prompt_length",)}, "scores need the tokens alone"
    shared = {"transfer.reward_inference.1of4@1", "transfer.reward_inference.2of4@1"}
    assert shared <= waits(augmented, "critic_inference.1of2@1")
    assert shared.isdisjoint(waits(augmented, "critic_inference.2of2@1"))


def test_the_titles_say_the_part():
    augmented = augment(ppo(), streamed(actor_generate=4, ref_inference=4), 1)
    assert augmented.node("actor_generate.2of4@1").title == "actor.generate · part 2 of 4 · step 1 · n0:0-1 dp2 · v0"
    title = augmented.node("transfer.ref_inference.2of4@1").title
    assert title == "transfer → ref.inference · part 2 of 4 · step 1 · n0:0-1 + n0:2"


@pytest.mark.parametrize("parts", [1, 2, 4, 8])
def test_every_row_is_in_a_single_part_on_every_replica(parts):
    graph = ppo(mini_batches=2)
    plan = streamed(graph, actor_generate=parts, ref_inference=parts)
    needs = placed_call(graph, plan, "actor_generate").needs().values()
    by_part = [{row for need in needs for row in need.share.rows(part=Part(i, parts))} for i in range(parts)]
    assert [sorted(rows) for rows in by_part] == [
        list(range(i * 8 // parts, (i + 1) * 8 // parts)) for i in range(parts)
    ]
    assert partition_of(graph, plan, "actor_generate").mini_batches % parts == 0


def test_the_reference_model_begins_while_the_next_part_is_generated():
    """With durations that are easy to add: four parts of 10 s and of 4 s take 44 s, and 14 * 4 s in sequence."""
    augmented = augment(ppo(), streamed(actor_generate=4, ref_inference=4), 1)
    seconds = {node.id: 10.0 * (node.kind == "generate") + 4.0 * (node.id.startswith("ref_")) for node in augmented}
    found = {slot.node.id: slot for slot in schedule(augmented, seconds).slots}
    assert found["ref_inference.1of4@1"].start == 10.0
    assert found["ref_inference.4of4@1"].end == 44.0


def test_streamed_separation_is_figure_5_of_adaptive_placement_and_parallelism():
    """Devices generate without a pause. A part's inference is beside the next part, training beside the next step."""
    graph = ppo(staleness=1)
    augmented = augment(graph, preset("separation-streamed", graph, FOUR, FOUR.whole), 5)
    seconds = {"generate": 10.0, "inference": 3.0, "train_step": 15.0}
    found = {slot.node.id: slot for slot in schedule(augmented, lambda node: seconds.get(node.kind, 0.0)).slots}
    generates = [found[f"actor_generate.{index}of4@{step}"] for step in (2, 3, 4) for index in range(1, 5)]
    assert [slot.start for slot in generates[1:]] == [slot.end for slot in generates[:-1]]
    for index, generate in enumerate(generates[4:8], start=1):
        inferences = [found[f"{name}.{index}of4@3"] for name in INFERENCES]
        assert min(slot.start for slot in inferences) == generate.end
        assert max(slot.end for slot in inferences) == generate.end + 9.0
    trains = [found[f"{name}@3"] for name in ("actor_train_step", "critic_train_step")]
    assert generates[7].end <= min(slot.start for slot in trains)
    assert max(slot.end for slot in trains) <= generates[11].end


@pytest.mark.parametrize("name", ["actor_generate", "ref_inference"])
def test_parts_together_take_no_less_than_the_whole(name):
    """Each part counts as a call of its own."""
    sources = CostSources.equal_nodes(NODE, 1)

    def seconds(parts):
        plan = streamed(**{name: parts})
        costs, augmented = NodeCosts(ppo(), plan, WORK, sources), augment(ppo(), plan, 1)
        return sum(
            costs.seconds(node)
            for node in augmented
            if node.call and node.call.name == name and node.kind != "transfer"
        )

    taken = [seconds(parts) for parts in (1, 2, 4)]
    assert taken == sorted(taken)
    assert taken[0] < taken[2]


def test_the_cache_has_room_for_the_rows_of_a_part():
    """vLLM's cache is for the rows in flight: of 8 rows in 2 replicas 4, or 1 in 4 parts."""

    def cache(**parts):
        peaks = certify_plan(streamed(**parts), ppo(), WORK, "cpu").peaks
        shares = next(peak.shares for peak in peaks if peak.device == "n0:0")
        return next(share.num_bytes for share in shares if share.what == "key-value cache")

    blocks = [cache(actor_generate=parts) for parts in (1, 2, 4)]
    assert blocks[0] - blocks[1] == 2 * (blocks[1] - blocks[2]) > 0
