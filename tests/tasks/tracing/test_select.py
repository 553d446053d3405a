"""The word select: what it adds to a graph, and what it refuses."""

import pytest

from prefect_rlhf.engines.compute import Computed
from prefect_rlhf.engines.losses.protocol import LossValues
from prefect_rlhf.errors.errors import GraphError
from prefect_rlhf.placement.cost.workload import CallWork, Workload
from prefect_rlhf.placement.graph import Dataset
from prefect_rlhf.placement.models.model import ModelSpec, TransformerShape
from prefect_rlhf.placement.row_set import RowCount
from prefect_rlhf.tasks.settings import Settings
from prefect_rlhf.tasks.tracing.calls import compute, generate, inference, train_step
from prefect_rlhf.tasks.tracing.operations import computation, loss
from prefect_rlhf.tasks.tracing.select import select
from prefect_rlhf.tasks.tracing.trace import trace_body

pytestmark = pytest.mark.quick

SHAPE = TransformerShape(64, 128, 2, 4, 2, 16, 100, 64, 1e4, 1e-5, True)
MODELS = {"actor": ModelSpec("actor", "a", "lm", SHAPE), "reward": ModelSpec("reward", "r", "scalar", SHAPE)}
DATASETS = {
    "prompts": Dataset("prompts", ("prompt_tokens",), 10),
    "pairs": Dataset("pairs", ("tokens", "prompt_length"), 10, rows_per_item=2),
}
NONE = Settings()


@computation("keep")
def keeps_all(rows, scores, settings):
    return Computed({"keep": scores["scores"] > 0})


@computation("keep")
def keeps_some(rows, settings):
    return Computed({"keep": rows.groups > 0})


@computation("stays")
def keeps_nothing_by_name(rows, settings):
    return Computed({"stays": rows.groups > 0})


@computation("prompt_tokens")
def a_judges_prompts(rows, settings):
    return Computed({"prompt_tokens": rows.columns["tokens"]})


@loss("logprobs")
def of_rows(output, batch, settings):
    return LossValues(output)


@loss("logprobs", rows_per_item=2)
def of_pairs(output, batch, settings):
    return LossValues(output)


class Stand:
    """An argument object with an identity."""


def traced(body):
    models = {role: MODELS[role] for role in ("actor", "reward")}
    arguments = {name: Stand() for name in (*models, *DATASETS)}

    def whole(prompts, pairs, actor, reward):
        rollout = generate(actor, prompts, batch_size=6, samples=4)
        scores = inference(reward, rollout, output="scores")
        inference(reward, pairs, output="scores", name="of_pairs", batch_size=3)
        body(actor, rollout, scores, pairs)

    return trace_body("some", whole, arguments, models, DATASETS)


def test_kept_rows_have_the_first_inputs_keys_and_wait_for_the_selection():
    def body(actor, rollout, scores, pairs):
        kept = select(keeps_all, rollout, scores, at_most=3, expected=2, settings=NONE)
        train_step(actor, of_rows(NONE).on(kept, scores))

    graph = traced(body)
    choice, train = graph.call("keeps_all"), graph.call("actor_train")
    assert (choice.outputs, choice.chooses, choice.row_count) == ((), train.rows, RowCount(24, 24))
    assert (train.num_rows, train.span, train.row_count) == (12, 24, RowCount(12, 8))
    assert graph.reads_of("actor_train") == {
        "keeps_all": (),
        "actor_generate": ("tokens", "prompt_length", "logprobs", "truncated"),
        "reward_inference": ("scores",),
    }


def test_a_groups_pairs_are_never_split():
    def body(actor, rollout, scores, pairs):
        kept = select(keeps_all, rollout, scores, per_group=2, settings=NONE)
        train_step(actor, of_pairs(NONE).on(kept))

    train = traced(body).call("actor_train")
    assert (train.num_rows, train.rows_per_item) == (12, 2)


REFUSED = {
    "unrelated rows": (
        lambda actor, rollout, scores, pairs: select(keeps_all, pairs, scores, settings=NONE),
        "select keeps_all reads pairs and reward_inference, whose rows do not belong together",
    ),
    "another key": (
        lambda actor, rollout, scores, pairs: select(keeps_nothing_by_name, rollout, settings=NONE),
        'keeps_nothing_by_name makes stays, not a @computation("keep")',
    ),
    "more groups than there are": (
        lambda actor, rollout, scores, pairs: select(keeps_some, rollout, at_most=7, settings=NONE),
        "got at_most 7, expected 1 to 6, the groups of actor_generate",
    ),
    "more rows than a group has": (
        lambda actor, rollout, scores, pairs: select(keeps_some, rollout, per_group=5, settings=NONE),
        "got per_group 5, expected 1 to 4",
    ),
    "more expected than may be": (
        lambda actor, rollout, scores, pairs: select(keeps_some, rollout, at_most=2, expected=3, settings=NONE),
        "got expected 3, expected 1 to 2, at_most",
    ),
    "pairs of a ragged choice": (
        lambda actor, rollout, scores, pairs: train_step(
            actor, of_pairs(NONE).on(select(keeps_some, rollout, settings=NONE))
        ),
        "keeps_some keeps any number of each group of actor_generate",
    ),
    "new rows of kept ones": (
        lambda actor, rollout, scores, pairs: compute(
            a_judges_prompts, select(keeps_some, rollout, settings=NONE), settings=NONE, max_new_tokens=0
        ),
        "make them from all rows first, then select",
    ),
    "the rows before read what is known of those kept": (
        lambda actor, rollout, scores, pairs: train_step(
            actor, of_rows(NONE).on(select(keeps_some, rollout, settings=NONE), pairs)
        ),
        "whose rows do not belong together",
    ),
    "a loop until there are enough": (
        lambda actor, rollout, scores, pairs: len(select(keeps_some, rollout, settings=NONE)) < 4,
        "in place of a loop until there are enough, make more than enough and keep at_most",
    ),
    "an equality": (lambda actor, rollout, scores, pairs: scores == 1, "do not exist while the body is traced"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_impossible_selection_is_refused_when_it_is_traced(name):
    body, says = REFUSED[name]
    with pytest.raises(GraphError) as caught:
        traced(body)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_memory_uses_the_most_rows_and_time_the_expected_rows():
    def body(actor, rollout, scores, pairs):
        kept = select(keeps_all, rollout, scores, at_most=4, expected=1, settings=NONE)
        train_step(actor, of_rows(NONE).on(kept) + of_rows(NONE).on(pairs, name="whole", batch_size=3))

    train = traced(body).call("actor_train")
    most, as_a_rule = (make(train, Workload.fixed(1, 1)) for make in (CallWork.of, CallWork.expected))
    assert [part.rows for part in most.by_row_set] == [16, 6]
    assert [part.rows for part in as_a_rule.by_row_set] == [4, 6]
