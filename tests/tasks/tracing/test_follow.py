"""follow in a body: the graph that it makes, and what is refused before a device is used."""

from dataclasses import replace

import pytest

from prefect_rlhf.errors.errors import GraphError, NotUsed
from prefect_rlhf.placement.augmented.augment import augment
from prefect_rlhf.placement.augmented.unroll import unroll
from prefect_rlhf.placement.cost.workload import Workload
from prefect_rlhf.placement.devices.mesh import ClusterShape
from prefect_rlhf.placement.graph import Dataset
from prefect_rlhf.placement.memory.certificate import augment_few, certify
from prefect_rlhf.placement.models.adapter import AdapterSpec
from prefect_rlhf.placement.planner.preset_plan import preset
from prefect_rlhf.tasks.reporting.pictures.dataflow import dataflow_svg, dataflow_text
from prefect_rlhf.tasks.rl.losses import nll
from prefect_rlhf.tasks.rl.moving_reference import move_reference
from prefect_rlhf.tasks.settings import MovingReference, Settings
from prefect_rlhf.tasks.tracing.calls import follow, inference, train_step
from prefect_rlhf.tasks.tracing.trace import trace_body
from tests.support.strategies import GIB, SMALL, model

pytestmark = pytest.mark.quick

CHATS = Dataset("chats", ("tokens", "prompt_length"), 8)
LOSS = nll(Settings())


class Role:
    """An argument that represents a model."""


def traced(body, models=None):
    """The graph of a body of (chats, actor, ref, other)."""
    arguments = {"chats": object(), "actor": Role(), "ref": Role(), "other": Role()}
    models = {"actor": model("actor"), "ref": model("ref"), "other": model("other")} | (models or {})

    def whole(chats, actor, ref, other):
        body(chats, actor, ref, other)
        inference(other, chats, output="logprobs", name="last")

    return trace_body("mine", whole, arguments, models, {"chats": CHATS})


def refused(body, models=None):
    with pytest.raises(GraphError) as error:
        traced(body, models)
    assert "\n" not in str(error.value)
    return str(error.value)


def usual(every=2, share=0.5):
    def body(chats, actor, ref, other):
        inference(ref, chats, output="logprobs")
        train_step(actor, LOSS.on(chats))
        follow(ref, actor, every=every, share=share)
        inference(ref, chats, output="logprobs", name="ref_after")

    return body


def test_calls_before_a_follow_read_the_older_version_and_calls_after_it_the_newest():
    reads = {run.id: run.reads for run in unroll(traced(usual()), 5)}
    assert [reads[f"ref_inference@{step}"] for step in range(1, 6)] == [0, 0, 2, 2, 4]
    assert [reads[f"ref_after@{step}"] for step in range(1, 6)] == [0, 2, 2, 4, 4]


def test_the_graph_names_followers_and_leaders():
    graph = traced(usual(share=0.25))
    assert "    ref <- follows actor: 0.25 of it every 2 steps" in dataflow_text(graph).splitlines()
    assert "follows actor" in dataflow_svg(graph)


def test_every_second_step_has_a_follow_node():
    """It waits for the training and for the readers of the version before, and the next training waits for it."""
    cluster = ClusterShape("two", 1, 2, 8 * GIB)
    graph = traced(usual())
    nodes = augment(graph, preset("flattening", graph, cluster, cluster.whole), 4)
    assert [node.id for node in nodes if node.kind == "follow"] == ["follow.ref.megatron@2", "follow.ref.megatron@4"]
    node = nodes.node("follow.ref.megatron@4")
    assert {"actor_train@4", "follow.ref.megatron@2", "ref_inference@4", "ref_after@2"} <= set(node.depends_on)
    assert "follow.ref.megatron@2" in nodes.node("actor_train@3").depends_on
    assert node.title.startswith("ref.follow of actor · step 4 · ") and node.title.endswith(" · v2 → v4")


def test_a_certificate_counts_main_weights_and_arriving_weights():
    """In bfloat16; a copy needs neither, whatever `every` is."""
    cluster = ClusterShape("one", 1, 1, 8 * GIB)

    def shares(every, share):
        graph = traced(usual(every, share))
        plan = preset("flattening", graph, cluster, cluster.whole)
        augmented = augment_few(graph, plan)
        assert any(node.kind == "follow" for node in augmented)
        (peak,) = certify(augmented, Workload.fixed(8, 8), "cuda").peaks
        return {each.what: each.num_bytes for each in peak.shares if each.owner.startswith("ref")}

    averaged, copied = shares(100, 0.5), shares(100, 1.0)
    assert "main weights" not in copied
    assert averaged["main weights"] == 2 * averaged["weights"], "float32 beside bfloat16"


def test_a_model_that_follows_an_adapted_one_has_its_own_adapter():
    """It begins as the leader's does, and the base is still shared."""
    adapter = AdapterSpec(4, 8.0, ("q_proj",), path="sft")
    models = {role: replace(model(role), content="folder", path="same") for role in ("actor", "ref")}
    models["actor"] = replace(models["actor"], adapter=adapter)
    graph = traced(usual(), models)
    assert graph.model("ref").adapter == adapter
    assert [own.name for own in graph.weights("ref") if own.trained] == ["ref.adapter"]
    assert [own.name for own in graph.weights("ref") if not own.trained] == ["actor.trunk"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"share": 0}, "got share=0, expected more than 0, at most 1 (a copy of actor)"),
        ({"share": 1.5}, "got share=1.5, expected more than 0, at most 1 (a copy of actor)"),
        ({"share": "half"}, "got share='half', expected a finite number"),
        ({"every": 0}, "got every=0, expected a whole number of at least 1"),
        ({"every": None}, "got every=None, expected a whole number of at least 1 (steps)"),
    ],
)
def test_a_wrong_number_is_refused(words, said):
    assert f"flow mine: follow(ref, actor): {said}" in refused(usual(**words))


def body_of(*parts):
    """A body that uses ref and trains actor, with these calls in the given order."""

    def body(chats, actor, ref, other):
        inference(ref, chats, output="logprobs")
        calls = {
            "train": lambda: train_step(actor, LOSS.on(chats)),
            "train ref": lambda: train_step(ref, LOSS.on(chats)),
            "follow": lambda: follow(ref, actor),
            "follow itself": lambda: follow(ref, ref),
            "follow other": lambda: follow(ref, other),
            "other follows ref": lambda: follow(other, ref),
        }
        for part in parts:
            calls[part]()
        if "train" not in parts:
            inference(actor, chats, output="logprobs")

    return body


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        (("train", "train ref", "follow"), "follow(ref, actor): ref_train trains ref, expected one of the two"),
        (("follow",), "follow(ref, actor): no train_step trains actor, expected one"),
        (("follow", "train"), "follow(ref, actor): it stands before actor_train, expected after it"),
        (("train", "follow itself"), "follow(ref, ref): got the same model twice"),
        (("train", "follow", "follow other"), "follow(ref, other): ref follows actor already"),
        (("train", "follow", "other follows ref"), "follow(other, ref): no train_step trains ref, expected one: it"),
    ],
)
def test_a_wrong_pair_is_refused(parts, said):
    assert said in refused(body_of(*parts))


def with_adapter(role, rank, path=""):
    return {role: replace(model(role), adapter=AdapterSpec(rank, 8.0, ("q_proj",), path=path))}


@pytest.mark.parametrize(
    ("models", "said"),
    [
        ({"ref": model("ref", shape=replace(SMALL, num_layers=1))}, "ref has num_layers 1, expected"),
        ({"ref": model("ref", head="lm+scalar")}, "ref has head lm+scalar, expected a head of actor's, which has no"),
        (with_adapter("ref", 4, "a"), "ref has an adapter, expected none"),
        (with_adapter("actor", 4) | with_adapter("ref", 8), "ref.adapter has rank 8, expected 4, as actor has"),
        (with_adapter("actor", 4), "ref has the base /models/ref, expected /models/actor"),
    ],
    ids=["shape", "head", "adapter of a whole model", "rank", "base"],
)
def test_models_that_differ_are_refused(models, said):
    assert said in refused(usual(), models)


def test_settings_without_a_reference_are_refused():
    with pytest.raises(NotUsed, match="no ref is set"):
        move_reference(None, object(), MovingReference(every=2))
    with pytest.raises(ValueError, match="never changes without every"):
        MovingReference(share=0.5)
