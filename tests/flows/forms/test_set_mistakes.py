"""Mistakes in named sets of an evaluation: one line each, before a device; and what the calls of sets are."""

import re

import pytest

from prefect_rlhf.blocks.dataset import Prompts
from prefect_rlhf.errors.errors import InvalidInput, RlhfError
from prefect_rlhf.flows.commands.flags import read_parameters
from prefect_rlhf.flows.forms.evaluation import EvaluationSet, metric_name
from prefect_rlhf.flows.grpo import grpo
from prefect_rlhf.flows.reward import reward
from prefect_rlhf.flows.sft import sft
from prefect_rlhf.placement.devices.mesh import ClusterShape
from prefect_rlhf.tasks.checkpoints.metric_names import metric_names
from tests.flows.test_algorithms import traced
from tests.support.runs import prepared, whole
from tests.support.tiny import make_model
from tests.tasks.data.stored import json_lines

pytestmark = pytest.mark.quick
DESK = whole(ClusterShape("desk", num_nodes=1, devices_per_node=1, device_memory_bytes=8 << 30))
FUNCTIONS = {"functions": {"length": {"function": "my_rewards.py:length"}}}


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """Parameters of a GRPO run that is evaluated on a set."""
    folder = tmp_path_factory.mktemp("sets")
    (folder / "my_rewards.py").write_text("def length(row):\n    return float(len(row['response']))\n")
    rows = [{"prompt": "what is it", "split": split} for split in ("train", "held_out")]
    data = {"path": json_lines(folder / "prompts.jsonl", *rows)}
    rewards = {"functions": {"length": {"function": f"{folder}/my_rewards.py:length", "try_first": False}}}
    return {
        "prompts": data,
        "held_out": data,
        "actor": {"path": make_model(folder / "actor")},
        "reward": rewards,
        "algo": {"batch_size": 1, "samples_per_prompt": 2, "kl": {"coefficient": 0.0}},
        "evaluation": {"math": {"data": {**data, "split": "held_out"}, "samples": 4}},
        "output_dir": str(folder / "runs"),
    }


def changed(good, **of_set):
    """The parameters with other fields of the set."""
    return good | {"evaluation": {"math": good["evaluation"]["math"] | of_set}}


@pytest.mark.parametrize(
    ("of_set", "says"),
    [
        ({"samples": 1, "pass_at": [4]}, "evaluation.math.samples: got 1, expected at least 4, for pass@4"),
        ({"temperature": 0.0}, "evaluation.math.temperature: got 0.0, expected above 0, or samples: 1"),
        ({"sampels": 2}, "evaluation.math.sampels: unknown key .*closest: samples"),
        ({"samples": 1, "top_p": 0.5}, "evaluation.math.top_p: 0.5 is not used: a greedy response is not random"),
        ({"max_new_tokens": 100}, "evaluation.math.max_new_tokens: got 100, expected at most 60"),
        ({"data": {"path": "nowhere.jsonl"}}, "evaluation.math.data.path: got 'nowhere.jsonl'"),
    ],
)
def test_a_mistake_in_a_set_is_refused_in_a_line_with_its_field(good, of_set, says):
    with pytest.raises(RlhfError, match=says) as refused:
        prepared(grpo, changed(good, **of_set), DESK)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (
            {"limits": {"evaluation.math.pas@4": 1.0}},
            r"limits: got 'evaluation_math.pas@4', expected evaluation_math.pass@4, perhaps: evaluation_math has",
        ),
        ({"limits": {"actor_generate.truncatd": 1.0}}, "limits: got 'actor_generate.truncatd', .*actor_generate.trunc"),
        (
            {"best_metric": "evaluation.math.pass@8", "checkpoint_every": 10},
            r"best_metric: got 'evaluation_math.pass@8', expected evaluation_math.pass@",
        ),
    ],
)
def test_a_metric_that_no_evaluation_has_is_refused(good, more, says):
    with pytest.raises(InvalidInput, match=says):
        prepared(grpo, good | more, DESK)


def test_an_empty_set_is_refused(good, tmp_path):
    empty = json_lines(tmp_path / "empty.jsonl", {"prompt": "what is it", "split": "train"})
    with pytest.raises(InvalidInput, match=r"evaluation.math.data.split: got 'held_out', expected .*train"):
        prepared(grpo, changed(good, data={"path": empty, "split": "held_out"}), DESK)


def test_two_sets_with_the_same_name_are_refused(tmp_path):
    """YAML would keep the second alone."""
    file = tmp_path / "p.yaml"
    file.write_text("evaluation:\n  math: {samples: 1}\n  math: {samples: 2}\n")
    with pytest.raises(InvalidInput, match="math"):
        read_parameters(file, [])


def a_set(**fields):
    """A set with made-up prompts."""
    return EvaluationSet.model_validate({"data": Prompts(path="math.jsonl")} | fields)


@pytest.mark.parametrize(
    ("flow", "fields", "says"),
    [
        (sft, {"max_new_tokens": 8}, "evaluation.math.reward: missing; expected functions that score the responses"),
        (sft, {"reward": FUNCTIONS}, "evaluation.math.max_new_tokens: missing; expected a number of tokens"),
        (
            reward,
            {"reward": FUNCTIONS, "max_new_tokens": 8},
            "evaluation.math: .* is not used: reward has no model",
        ),
    ],
)
def test_a_set_states_settings_that_its_algorithm_lacks(flow, fields, says):
    """Of any algorithm: those that do not sample have no reward and no length, and a reward model does not answer."""
    with pytest.raises(InvalidInput, match=says):
        with_set(flow, a_set(**fields))


def with_set(flow, one):
    """The graph of a flow with a set, on made-up models and datasets."""
    return traced(flow, evaluation={"math": one})


@pytest.mark.parametrize("flow", [grpo, sft])
def test_a_set_adds_evaluation_calls_to_any_algorithm(flow):
    """Each runs every k steps with the newest weights; several samples make groups of a prompt."""
    graph = with_set(flow, a_set(samples=4, reward=FUNCTIONS, every=7, temperature=0.5, max_new_tokens=9))
    names = ("actor_evaluation_math", "reward_evaluation_math", "evaluation_math")
    assert [call.name for call in graph][-3:] == list(names)
    assert {graph.call(name).every for name in names} == {7}
    made = graph.call("actor_evaluation_math")
    assert (made.num_rows, made.max_new_tokens) == (256, 9)
    assert graph.call("evaluation_math").num_rows == 256
    assert {edge.lag for edge in graph.version_edges() if edge.target == made.name} == {0}
    known = metric_names(graph.call("evaluation_math"))
    assert known.excludes("pass@3") and not known.excludes("pass@4_low") and not known.excludes("maj@4")


def test_a_set_may_be_played_and_its_play_scores_it():
    """Also in an algorithm that trains without one."""
    play = {"function": "my_play.py:solve", "max_tokens": 32}
    graph = with_set(grpo, a_set(samples=2, play=play, every=3))
    made = graph.call("actor_evaluation_math")
    assert made.play is not None and made.play.max_tokens == 32
    assert {port.source for port in graph.call("evaluation_math").inputs} == {"actor_evaluation_math"}
    assert graph.call("actor_generate").play is None


def test_without_a_set_a_graph_is_as_before():
    assert traced(grpo, evaluation={}) == traced(grpo)


def test_a_metric_may_be_named_as_its_parameter_is():
    assert metric_name("evaluation.math.pass@4") == "evaluation_math.pass@4"
    assert re.fullmatch(r"record_evaluation\.score", metric_name("record_evaluation.score"))
