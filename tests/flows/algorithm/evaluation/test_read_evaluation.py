"""What an evaluation takes of a file, also of a training run's: nothing is passed over in silence."""

import pytest

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.flows.algorithm.evaluation.flow import evaluate
from prefect_rlhf.flows.algorithm.evaluation.parameters import read_evaluation
from prefect_rlhf.flows.commands.cli import main

pytestmark = pytest.mark.quick
TRAINED = {
    "prompts": {"path": "p.jsonl"},
    "held_out": {"path": "h.jsonl", "split": "held_out"},
    "actor": {"path": "before", "dtype": "float32"},
    "reward": {"functions": {"exact": {"function": "mine.py:exact"}}},
    "algo": {"batch_size": 8, "sampling": {"max_new_tokens": 99}},
    "steps": 100,
    "seed": 5,
    "start_deadline_seconds": 900,
}
SETS = {"math": {"data": {"path": "m.jsonl"}}}


def test_a_training_runs_file_gives_sets_reward_sampling_seed_and_deadlines_and_lists_the_rest():
    sets = {"math": {"data": {"path": "m.jsonl"}, "samples": 4}}
    found, unused = read_evaluation("after", {**TRAINED, "evaluation": sets}, {})
    assert found == {
        "actor": {"path": "after", "dtype": "float32"},
        "reward": TRAINED["reward"],
        "algo": {"sampling": {"max_new_tokens": 99}},
        "evaluation": sets,
        "seed": 5,
        "start_deadline_seconds": 900,
        "steps": 1,
    }
    assert unused == ["prompts.path", "held_out.path", "held_out.split", "algo.batch_size", "steps"]
    checked = evaluate.validate_parameters(found)
    assert checked["evaluation"]["math"].samples == 4 and checked["steps"] == 1


def test_without_sets_the_held_out_prompts_form_a_set():
    found, unused = read_evaluation("after", TRAINED, {"evaluation": {}})
    assert found["evaluation"] == {"held_out": {"data": TRAINED["held_out"]}} and "held_out.path" not in unused


@pytest.mark.parametrize(
    ("stated", "says"),
    [
        ({}, "evaluation: missing; expected sets of prompts"),
        ({"steps": 3, "held_out": {"path": "h"}}, "steps: 3 is not used: nothing is trained"),
        ({"evaluation": {"a": {"data": {"path": "h"}}}, "held_out": {"path": "h"}}, "held_out: .* is not used"),
    ],
)
def test_parameters_that_an_evaluation_cannot_use_are_refused(stated, says):
    with pytest.raises(InvalidInput, match=says):
        read_evaluation("after", {}, stated)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["evalution.math.samples=3", "held_out.path=h.jsonl"], "evalution: unknown key"),
        (["ref.path=other", "held_out.path=h.jsonl"], "ref: unknown key"),
    ],
)
def test_a_wrong_key_next_to_the_file_is_refused_in_a_line(capsys, words, says):
    flags = [word for one in words for word in ("-p", one)]
    assert main(["evaluate", "nowhere", "--dry-run", *flags]) == 2
    said = capsys.readouterr().err.splitlines()
    assert says in said[-1]


def test_a_peft_folder_is_evaluated_on_the_base_that_it_names(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "models/base"}')
    found, _ = read_evaluation(str(tmp_path), {"evaluation": SETS, "actor": {"dtype": "float32"}}, {})
    assert found["actor"] == {"dtype": "float32", "path": "models/base", "adapter": {"path": str(tmp_path)}}


def test_a_peft_folder_that_names_no_base_is_refused(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(InvalidInput, match="MODEL: adapter_config.json: base_model_name_or_path: got None, "):
        read_evaluation(str(tmp_path), {"evaluation": SETS}, {})


def test_a_whole_model_is_evaluated_without_the_adapter_that_training_would_make():
    found, unused = read_evaluation("models/base", {"evaluation": SETS, "actor": {"adapter": {"rank": 8}}}, {})
    assert found["actor"] == {"path": "models/base"}
    assert unused == ["actor.adapter.rank"]
