"""Unrolling: which runs there are, and which weight version each of them reads."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_rlhf.errors.errors import GraphError
from prefect_rlhf.placement.augmented.unroll import unroll
from prefect_rlhf.placement.graph import DataflowGraph, Dataset
from tests.support.strategies import HELD_OUT, call, dpo, generated, graphs, model, ppo, remax

pytestmark = pytest.mark.quick


def versions_by_hand(graph: DataflowGraph, num_steps: int) -> dict[str, int | None]:
    """Run the program line by line, counting train_steps; an oracle that knows no edges."""
    now = {spec.role: 0 for spec in graph.models}
    at_start: list[dict[str, int]] = []
    found: dict[str, int | None] = {}
    for step in range(num_steps + 1):
        at_start.append(dict(now))
        stale = at_start[max(1, step - graph.staleness)] if step else now
        trained: set[str] = set()
        for each in [*(one for one in graph if one.every is None), *(one for one in graph if one.every is not None)]:
            if each.every is not None:  # a reference follows after training
                now |= followed_by_hand(graph, step)
            runs = step > 0 if each.every is None else step % each.every == 0 or step == num_steps
            if not runs:
                continue
            name = f"{each.name}@{step}"
            if each.role is None:
                found[name] = None
            elif each.every is not None:
                found[name] = now[each.role]
            elif each.kind == "train_step":
                found[name] = at_start[step][each.role]
            else:
                found[name] = now[each.role] if each.role in trained else stale[each.role]
            if each.kind == "train_step":
                now[each.role] += 1
                trained.add(each.role)
        now |= followed_by_hand(graph, step)
    return found


def followed_by_hand(graph: DataflowGraph, step: int) -> dict[str, int]:
    """The versions that followers get after a step."""
    return {spec.role: step for spec in graph.models if spec.follows and step and step % spec.follows.every == 0}


@given(graphs(), st.integers(1, 7))
def test_every_run_reads_the_version_that_the_program_says(graph, num_steps):
    """Runs and versions are those of the program run line by line, readers behind by the staleness."""
    assert {run.id: run.reads for run in unroll(graph, num_steps)} == versions_by_hand(graph, num_steps)


@given(graphs(), st.integers(1, 7))
def test_a_reader_waits_for_the_train_step_that_made_its_version(graph, num_steps):
    made = {(r.call.role, r.reads + 1): r.id for r in unroll(graph, num_steps) if r.call.kind == "train_step"}
    for run in unroll(graph, num_steps):
        is_trained = run.call.role is not None and graph.trained_by(run.call.role) is not None
        wanted = [made[run.call.role, run.reads]] if run.reads and is_trained else []
        assert [d.node for d in run.dependencies if d.kind == "version"] == wanted


def test_remax_reads_the_same_version_in_both_generations():
    runs = {run.id: run for run in unroll(remax(), 3)}
    assert runs["actor_generate@3"].reads == runs["actor_generate_baseline@3"].reads == 2


def test_calls_after_the_train_step_read_its_new_weights():
    """Several readers after the trainer, each of the new version, and still the next step's readers of the same."""
    graph = ppo()
    keys = {"actor_generate": ("tokens", "prompt_length")}
    late = [call(name, "inference", "actor", keys, ("logprobs",)) for name in ("after", "after_again")]
    graph = DataflowGraph("late", graph.models, graph.datasets, (*graph.calls, *late), staleness=1)
    runs = {run.id: run for run in unroll(graph, 3)}
    assert (runs["after@2"].reads, runs["after_again@2"].reads) == (2, 2)
    assert runs["actor_generate@3"].reads == 1


def test_evaluation_runs_every_k_steps_and_once_after_the_last():
    runs = [run for run in unroll(ppo(evaluate_every=2), 5) if run.call.name == "evaluate_generate"]
    assert [(run.step, run.reads) for run in runs] == [(0, 0), (2, 2), (4, 4), (5, 5)]


def test_a_stateful_call_follows_its_previous_run():
    """Also when that is an evaluation, whose last run comes out of turn."""
    graph = ppo(evaluate_every=2)
    evaluated = {"rows": generated("evaluate_generate", HELD_OUT), "num_rows": 4}
    state = call("track", "compute", None, {"evaluate_scores": ("scores",)}, stateful=True, every=2, **evaluated)
    graph = DataflowGraph("stateful", graph.models, graph.datasets, (*graph.calls, state))
    runs = {run.id: run for run in unroll(graph, 5)}
    before = {
        name: [d.node for d in runs[name].dependencies if d.kind == "state"]
        for name in ("advantages@1", "advantages@2", "track@0", "track@4", "track@5")
    }
    assert before == {
        "advantages@1": [],
        "advantages@2": ["advantages@1"],
        "track@0": [],
        "track@4": ["track@2"],
        "track@5": ["track@4"],
    }


GENERATE = call("actor_generate", "generate", "actor", {"prompts": ("prompt_tokens",)}, ("tokens",))
TRAIN = call("actor_train", "train_step", "actor", {"actor_generate": ("tokens",)})
SCORE = {"actor_generate": ("tokens",)}


@pytest.mark.parametrize(
    ("calls", "says"),
    [
        ([GENERATE, GENERATE], "two calls are named 'actor_generate'"),
        ([GENERATE, TRAIN, call("again", "train_step", "actor", SCORE)], "and again both train the weights of actor"),
        ([call("x", "inference", "judge", {"prompts": ()})], "role 'judge', which no model has"),
        ([call("x", "inference", None, {"prompts": ()})], r"\(inference\) has role None"),
        ([call("x", "compute", "actor", {"prompts": ()})], r"\(compute\) has role 'actor'"),
        ([TRAIN, GENERATE], "neither a dataset nor an earlier call"),
        ([GENERATE, call("x", "compute", None, {"actor_generate": ("scores",)})], "needs 'scores' of actor_generate"),
        ([GENERATE, call("x", "compute", None, SCORE, every=2)], "which runs in every step, but x runs every 2 steps"),
        ([GENERATE, call("x", "compute", None, SCORE, num_rows=4)], "with 8 rows a step, but x works on 4"),
        (
            [GENERATE, call("x", "compute", None, SCORE, rows=HELD_OUT)],
            "which has rows of actor_generate; x works on rows of held_out, which are neither the same",
        ),
        ([GENERATE, call("x", "train_step", "actor", SCORE, every=2)], "that is for evaluation"),
        ([call("x", "inference", "actor", {"prompts": ()}, stateful=True)], "only a compute carries state"),
        ([call("x", "inference", "actor", {"prompts": ()}, num_rows=0)], "each must be at least 1"),
    ],
)
def test_a_graph_that_no_order_could_run_is_refused(calls, says):
    with pytest.raises(GraphError, match=says) as error:
        DataflowGraph("some", (model("actor"),), (Dataset("prompts", ("prompt_tokens",), 8),), tuple(calls))
    assert "\n" not in str(error.value)


def test_negative_staleness_is_refused():
    with pytest.raises(GraphError, match="staleness is -1"):
        DataflowGraph("some", dpo().models, dpo().datasets, dpo().calls, staleness=-1)
