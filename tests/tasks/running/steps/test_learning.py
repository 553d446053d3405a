"""What the metrics of steps say about learning: for runs that cannot learn, and no word for runs that do."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_rlhf.errors.errors import MISTAKES
from prefect_rlhf.placement.graph import DataflowGraph, Dataset, Operation, PlayBounds
from prefect_rlhf.tasks.running.steps.learning import WARN_AFTER, Findings, Learning
from tests.support.strategies import ROLLOUT, call, dpo, generated, model, ppo

pytestmark = pytest.mark.quick

LEARNS = {"actor_train.grad_norm": 0.5, "actor_train.learning_rate": 1e-6}
EQUAL = {"grpo_advantages.zero_deviation": 1.0, "grpo_advantages.zero_advantage": 1.0}
EMPTY = {"actor_train.grad_norm": 0.0, "actor_train.learning_rate": 1e-6, "actor_train.empty_updates": 2.0}
SKIPPED = {"actor_train.skipped_updates": 2.0}
CUT = {"grpo_advantages.truncated": 1.0, "grpo_advantages.trained_tokens": 0.0, "grpo_advantages.unscored": 0.0}


def grpo():
    """GRPO with an evaluation, and two optimizer steps in a step."""
    score = {"actor_generate": ROLLOUT[:2]}
    held_out = {"rows": generated("evaluation", generated("held_out")), "every": 2}
    calls = (
        call("actor_generate", "generate", "actor", {"prompts": ("prompt_tokens",)}, ROLLOUT),
        call("score", "compute", None, score, ("scores",)),
        call("informative", "compute", None, {"score": ("scores",)}, ("keep",)),
        call("grpo_advantages", "compute", None, {"score": ("scores",), "informative": ("keep",)}, ("advantages",)),
        call("apart", "compute", None, score, ("tokens",)),
        call("actor_train", "train_step", "actor", {"grpo_advantages": ("advantages",)}, epochs=2),
        call("evaluation", "compute", None, {"held_out": ("prompt_tokens",)}, ("tokens",), **held_out),
    )
    datasets = (Dataset("prompts", ("prompt_tokens",), 8), Dataset("held_out", ("prompt_tokens",), 4))
    return DataflowGraph("grpo", (model("actor"),), datasets, calls)


GRPO = grpo()


def run(graph, *steps, most=10, **options):
    """Return what a run of these steps says, and the warnings of the whole run."""
    learning = Learning(graph, most, **options)
    return [learning.step_ended({"step": at, **step}) for at, step in enumerate(steps, start=1)], learning.warnings


@pytest.mark.parametrize(
    ("step", "phrase"),
    [
        (EMPTY | EQUAL, "no group differs"),
        (EMPTY, "no gradient"),
        (EMPTY | {"grpo_advantages.zero_deviation": 0.5}, "no gradient"),
        (EMPTY | {"grpo_advantages.zero_advantage": 1.0}, "every advantage is 0"),
        (SKIPPED | {"score.unscored": 1.0}, "no row has a reward"),
        (SKIPPED | {"grpo_advantages.unscored": 1.0, "grpo_advantages.truncated": 1.0}, "no row has a reward"),
        (SKIPPED | CUT, "every answer was cut and masked"),
        (SKIPPED | CUT | {"grpo_advantages.truncated": 0.5, "grpo_advantages.unscored": 0.5}, "no row in the loss"),
        (SKIPPED, "no row in the loss"),
        (SKIPPED | {"informative.kept_rows": 0.0}, "informative kept no row"),
        (SKIPPED | {"informative.kept_rows": 0.0, "informative.zero_deviation": 1.0}, "no group differs"),
        (SKIPPED | {"informative.kept_rows": 0.0, "informative.unscored": 1.0}, "no row has a reward"),
        ({"actor_train.skipped_updates": 1.0, "actor_train.empty_updates": 1.0} | EQUAL, "no group differs"),
        (SKIPPED | {"apart.unscored": 1.0}, "no row in the loss"),
        (EMPTY | {"evaluation.unscored": 1.0, "evaluation.truncated": 1.0}, "no gradient"),
    ],
)
def test_a_line_for_a_step_without_gradient_names_the_cause(step, phrase):
    """From the metrics of the calls that the train_step reads, and of no other call."""
    (found,), _ = run(GRPO, step)
    assert found.phrase == f"{phrase}: nothing learnt"


def test_three_empty_steps_in_a_row_are_a_warning_and_ten_end_the_run():
    """The warning names cause, remedy and the end to come, once; the error names the setting."""
    found, warnings = run(GRPO, *[EMPTY | EQUAL] * 10)
    assert [len(each.warnings) for each in found] == [0, 0, 1, *[0] * 7]
    assert [each.error is not None for each in found] == [False] * 9 + [True]
    (warning,), error = warnings, str(found[9].error)
    assert warning.startswith("step 3: 3 steps in a row without a gradient (no group differs): nothing is learnt; use ")
    assert warning.endswith("; the run ends after 10 such steps in a row (most_empty_steps)")
    assert error.startswith("step 10: 10 steps in a row without a gradient (no group differs); use prompts")
    assert error.endswith("or allow more such steps by most_empty_steps (null: any number)") and "\n" not in error
    assert isinstance(found[9].error, MISTAKES), "to try again is in vain"


def test_a_setting_limits_empty_steps_or_allows_any_number():
    found, warnings = run(GRPO, *[EMPTY] * 2, most=2)
    assert found[1].error is not None and not warnings
    found, warnings = run(GRPO, *[EMPTY] * 40, most=None)
    assert not any(each.error for each in found) and len(warnings) == 1 and "the run ends" not in warnings[0]


def test_a_step_with_a_gradient_resets_the_count():
    found, warnings = run(GRPO, *[EMPTY, EMPTY, LEARNS] * 20)
    assert not warnings and not any(each.error for each in found)
    assert [each.phrase for each in found[:3]] == ["no gradient: nothing learnt"] * 2 + [""]


@pytest.mark.parametrize(
    "step",
    [
        LEARNS,
        LEARNS | {"actor_train.skipped_updates": 1.0, "actor_train.empty_updates": 0.0},
        LEARNS | {"actor_train.empty_updates": 1.0},
        LEARNS | {"actor_train.grad_norm": 1e-30},
        LEARNS | {"actor_train.learning_rate": 1e-30},
        LEARNS | {"actor_generate.truncated": 0.5, "score.unscored": 0.5, "actor_train.kl_per_token": 0.1},
        LEARNS | {"evaluation.truncated": 1.0, "evaluation.unscored": 1.0, "evaluation.kl_per_token": 9.0},
        LEARNS | {"grpo_advantages.zero_deviation": 1.0},
    ],
    ids=["plain", "half skipped", "half empty", "tiny", "warm-up", "at the limits", "evaluation", "penalties differ"],
)
def test_a_run_that_learns_gets_no_warning(step):
    found, warnings = run(GRPO, *[step] * 12)
    assert found == [Findings()] * 12 and not warnings


def test_a_learning_rate_of_0_is_exempt():
    """Nobody expects such a step to learn; it does not count, and does not end a count."""
    rests = EMPTY | {"actor_train.learning_rate": 0.0}
    found, warnings = run(GRPO, *[rests] * 12)
    assert found == [Findings()] * 12 and not warnings
    found, _ = run(GRPO, EMPTY, rests, EMPTY, rests, EMPTY, most=3)
    assert [each.error is not None for each in found] == [False] * 4 + [True]


def test_an_evaluation_before_training_is_not_a_step():
    found, _ = run(GRPO, *[EMPTY] * 9, {"evaluation.score": 1.0})
    assert found[9] == Findings()


def test_a_role_that_does_not_learn_is_named_while_another_learns():
    """PPO whose critic learns, while no row reaches the actor's loss."""
    step = {"critic_train_step.grad_norm": 1.0, "actor_train_step.skipped_updates": 1.0}
    found, warnings = run(ppo(), *[step] * 12)
    assert {each.phrase for each in found} == {"no row in the loss: actor learnt nothing"}
    assert not any(each.error for each in found)
    (warning,) = warnings
    assert warning.startswith("step 3: actor had no gradient in 3 steps in a row (no row in the loss); let ")
    both = step | {"critic_train_step.skipped_updates": 1.0}
    found, _ = run(ppo(), *[both] * 10)
    assert found[9].phrase == "no row in the loss: nothing learnt" and found[9].error is not None


def test_equal_rewards_are_named_even_if_a_kl_term_trains():
    """Such steps are not empty, so they do not end the run."""
    found, warnings = run(GRPO, *[LEARNS | EQUAL] * 12)
    assert {each.phrase for each in found} == {"no group differs"} and not any(each.error for each in found)
    (warning,) = warnings
    assert warning.startswith("step 3: no group differs in 3 steps in a row, so no reward moves actor; use ")


def test_pairs_without_a_gradient_count_as_empty_steps():
    found, _ = run(dpo(), {"actor_train_step.empty_updates": 1.0})
    assert found[0].phrase == "no gradient: nothing learnt"


@pytest.mark.parametrize(
    ("sign", "says"),
    [
        ({"actor_generate.truncated": 0.51}, "51% of the answers were cut (actor_generate.truncated); raise "),
        ({"score.unscored": 0.75}, "75% of the rows have no reward (score.unscored); such rows teach nothing"),
        ({"actor_train.kl_per_token": 0.3}, "the KL to the reference is 0.3 nats per token, above 0.2 (actor_train"),
        ({"apart.kl": 6.0, "apart.response_tokens": 12.0}, "the KL to the reference is 0.5 nats per token, above 0.2"),
        ({"actor_train.kl_per_token": float("inf")}, "the KL to the reference is inf nats per token"),
    ],
)
def test_a_sign_of_a_bad_run_is_a_warning_once(sign, says):
    found, warnings = run(GRPO, LEARNS, *[LEARNS | sign] * 5)
    assert warnings == found[1].warnings and len(warnings) == 1
    assert warnings[0].startswith(f"step 2: {says}") and "\n" not in warnings[0]


def test_engines_that_differ_under_the_same_weights_are_a_warning_of_the_first_step():
    """In a later step, the answers may come from older weights."""
    far = LEARNS | {"actor_train.initial_change": 0.14}
    _, (warning,) = run(GRPO, far, far)
    assert warning.startswith("step 1: the engine that answers and the one that trains differ by 0.14 nats per token")
    assert "above 0.1 (actor_train.initial_change)" in warning and "actor.dtype=float32" in warning
    assert not run(GRPO, LEARNS | {"actor_train.initial_change": 0.1}, far)[1]


def test_engines_are_compared_by_every_loss_term_but_not_by_a_metric_of_your_own():
    _, (warning,) = run(GRPO, LEARNS | {"actor_train.initial_policy.change": 0.2})
    assert "above 0.1 (actor_train.initial_policy.change)" in warning
    assert not run(GRPO, LEARNS | {"score.initial_change": 0.2, "actor_train.change": 0.2})[1]


def test_a_warning_about_cut_answers_names_the_parameter_that_bounds_them():
    """As a person states it, in this algorithm: with -p, or in a file."""
    rollout = replace(GRPO.call("actor_generate"), operation=Operation("sample", parameter="algo.first"))
    others = GRPO.calls[1:]
    cut, mask = LEARNS | {"actor_generate.truncated": 0.6}, SKIPPED | CUT
    _, (warning,) = run(replace(GRPO, calls=(rollout, *others)), cut)
    assert "raise algo.first.max_new_tokens, or teach shorter answers" in warning
    _, warnings = run(replace(GRPO, calls=(rollout, *others)), *[mask] * WARN_AFTER)
    assert "raise algo.first.max_new_tokens, or set algo.overlong.mask to false" in warnings[-1]
    _, (warning,) = run(GRPO, cut)
    assert "raise max_new_tokens of actor_generate, or" in warning
    play = replace(rollout, play=PlayBounds("{}", 9, 2, 2.0, 0.0, 0.0), max_new_tokens=9)
    _, (warning,) = run(replace(GRPO, calls=(play, *others)), cut)
    assert "raise play.max_tokens or play.max_turns, or teach" in warning


def test_a_users_kl_limit_replaces_the_default():
    far = LEARNS | {"actor_train.kl_per_token": 0.3}
    assert not run(GRPO, far, limited={"actor_train.kl_per_token": 1.0})[1]
    assert run(GRPO, far, limited={"actor_train.loss": 1.0})[1]


@given(st.lists(st.sampled_from([EMPTY, EMPTY | EQUAL, SKIPPED, LEARNS, LEARNS | EQUAL]), max_size=30), st.data())
def test_a_resumed_run_decides_like_an_uninterrupted_run(steps, data):
    """It reads the metrics of the steps before from the record of the run."""
    lines = [{"step": number, **step} for number, step in enumerate(steps)]
    at = data.draw(st.integers(0, len(lines)))
    whole, resumed = Learning(GRPO, 4), Learning(GRPO, 4)
    expected = [whole.step_ended(line) for line in lines]
    resumed.go_on([json.loads(json.dumps(line)) for line in lines[:at]])
    found = [resumed.step_ended(line) for line in lines[at:]]
    assert [str(each) for each in found] == [str(each) for each in expected[at:]]
    assert resumed.warnings == whole.warnings


def test_a_run_resumed_after_its_end_gets_the_full_count_of_empty_steps():
    """A person who resumes it has changed something, or wants to see more steps: it does not end at once."""
    learning = Learning(GRPO, 4)
    learning.go_on([{"step": number, **EMPTY} for number in range(5)])
    ends = [number for number in range(5, 20) if learning.step_ended({"step": number, **EMPTY}).error is not None]
    assert ends == [7, 11, 15, 19]
