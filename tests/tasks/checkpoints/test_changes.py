"""Which parameters a resumed run may change: those on which only numbers of later steps depend."""

import inspect
import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.flows.dpo import dpo
from prefect_rlhf.flows.grpo import grpo
from prefect_rlhf.flows.kto import kto
from prefect_rlhf.flows.ppo import ppo
from prefect_rlhf.flows.remax import remax
from prefect_rlhf.flows.reward import reward
from prefect_rlhf.flows.safe_rlhf import safe_rlhf
from prefect_rlhf.flows.sft import sft
from prefect_rlhf.tasks.checkpoints.changes import ResumedRun
from prefect_rlhf.tasks.checkpoints.folders import Checkpoint, Manifest
from prefect_rlhf.tasks.checkpoints.lineage import Change, Lineage, parameters_of, with_parameters
from prefect_rlhf.tasks.checkpoints.run_identity import run_identity
from prefect_rlhf.tasks.play import Play
from prefect_rlhf.tasks.rl.settings.online import GRPO, PPO, KLControl
from prefect_rlhf.tasks.rl.settings.policy import Overlong
from prefect_rlhf.tasks.settings import Optimizer
from tests.flows.test_algorithms import traced

pytestmark = pytest.mark.quick

STEP = 4
FLOWS = {flow.algorithm.name: flow for flow in (ppo, grpo, remax, sft, dpo, kto, reward, safe_rlhf)}
OTHER_STEPS = (
    r"(batch_size|evaluate_every|max_new_tokens|epochs|mini_batches|samples_per_prompt|over_sampling|follow\.every)$"
)
ONLY_AT_START = {"ppo": {"kl.coefficient"}, "safe-rlhf": {"kl.coefficient", "lagrange.start"}}
NO_REFERENCE = {"grpo": {"kl.coefficient": 0.5}}  # 0 would have other calls


def resumed(flow, before, now, changes=(), optimizers=None, **arguments):
    """A run of a flow with the settings `now`, from the checkpoint of a run with those `before`."""

    def identity_of(given):
        return run_identity(traced(flow, **given), 1, None)

    before, now = ({"algo": algo, **arguments} for algo in (before, now))
    saved = identity_of(before)
    manifest = Manifest(STEP, "", saved, {}, {}, {}, Lineage(parameters_of(before), changes))
    return ResumedRun(Checkpoint(Path("step-000004"), manifest), saved, now, identity_of, optimizers or {})


def other_value(flow, algo, name):
    """Settings that differ from `algo` in one number alone; None if no number there is valid."""
    value = parameters_of({"algo": algo})[name]
    tried = NO_REFERENCE.get(flow.algorithm.name, {}).get(name.removeprefix("algo."))
    for other in filter(None, (tried, 0.05, 3, 2, 0.7, 1.5, 12)):
        try:
            found = with_parameters({"algo": algo}, {name: other})["algo"]
            traced(flow, algo=found)
        except (ValidationError, InvalidInput):
            continue
        if parameters_of({"algo": found})[name] != value:
            return found
    return None


@pytest.mark.parametrize("algorithm", FLOWS)
def test_every_number_may_change_unless_it_decides_rows_calls_or_an_initial_state(algorithm):
    """Each is changed alone. What does not fit alone, such as `decay_steps` of a constant rate, is passed over."""
    flow = FLOWS[algorithm]
    algo = inspect.signature(flow.algorithm.body).parameters["algo"].default
    tried = 0
    for name, value in parameters_of({"algo": algo}).items():
        is_number = value is None or (isinstance(value, int | float) and not isinstance(value, bool))
        if not is_number or (now := other_value(flow, algo, name)) is None:
            continue
        tried += 1
        run = resumed(flow, algo, now)
        if name.removeprefix("algo.") in ONLY_AT_START.get(algorithm, ()):
            says = r"expected a parameter that later steps read; the checkpoint has the value that came of this one"
        elif re.search(OTHER_STEPS, name):
            says = r"expected a parameter that changes no rows, calls or lengths of a step"
        else:
            changes, identity = run.changes([name])
            assert changes == (Change(STEP, name, value, parameters_of({"algo": now})[name]),)
            assert identity == run.saved
            continue
        with pytest.raises(InvalidInput, match=rf"^resume_changes: got '{re.escape(name)}', {says}$"):
            run.changes([name])
    assert tried >= 10


def test_a_rates_schedule_may_change_but_no_other_word():
    """Nor the betas: the moments of the checkpoint are means under its own."""
    before, now = PPO(), PPO(actor_optimizer=Optimizer(lr=2e-5, head_lr=1e-3, schedule="linear", decay_steps=9))
    names = ["algo.actor_optimizer.schedule", "algo.actor_optimizer.decay_steps"]
    changes, _ = resumed(ppo, before, now).changes(names)
    assert [str(change) for change in changes] == [
        "after 4 steps: algo.actor_optimizer.schedule constant -> linear",
        "after 4 steps: algo.actor_optimizer.decay_steps None -> 9",
    ]
    for other, name in (
        (PPO(kl=KLControl(kind="fixed")), "algo.kl.kind"),
        (PPO(normalise_scores=True), "algo.normalise_scores"),
        (PPO(actor_optimizer=Optimizer(lr=2e-5, head_lr=1e-3, betas=(0.9, 0.99))), "algo.actor_optimizer.betas"),
    ):
        with pytest.raises(InvalidInput, match=f"'{name}', expected a parameter that is a number, or the schedule"):
            resumed(ppo, before, other).changes([name])


def test_a_fixed_coefficient_may_change():
    """Only an adaptive one has a value of its own in the checkpoint."""
    before, now = (PPO(kl=KLControl(kind="fixed", coefficient=value)) for value in (0.2, 0.1))
    assert len(resumed(ppo, before, now).changes(["algo.kl.coefficient"])[0]) == 1


def test_an_unnamed_difference_is_refused_as_the_user_wrote_it():
    """With the option that permits it, if it may change."""
    says = r"^algo\.clip: got 0\.1, expected 0\.2, as in the checkpoint step-000004; to change it from here on, "
    with pytest.raises(InvalidInput, match=says + r"add -p resume_changes=algo\.clip,algo\.gamma$"):
        resumed(ppo, PPO(), PPO(clip=0.1, gamma=0.5)).changes([])
    with pytest.raises(InvalidInput, match=r"^algo\.gamma: .* add -p resume_changes=algo\.clip,algo\.gamma$"):
        resumed(ppo, PPO(), PPO(clip=0.1, gamma=0.5)).changes(["algo.clip"])
    with pytest.raises(
        InvalidInput, match=r"^algo\.batch_size: got 16, expected 32, as in the checkpoint step-000004$"
    ):
        resumed(ppo, PPO(), PPO(batch_size=16, clip=0.1)).changes([])


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("algo.gamma", r"resume_changes: 'algo.gamma' is not used: algo.gamma is 1.0 in the checkpoint too; remove it"),
        (
            "algo.clp",
            r"resume_changes: got 'algo.clp', expected a number among the parameters of the .*, such as algo.clip",
        ),
        ("algo.kl", r"resume_changes: got 'algo.kl', expected a number among .*, such as algo.kl.coefficient"),
        ("seed", r"resume_changes: got 'seed', expected a number among .*, such as algo.actor_optimizer.lr"),
    ],
)
def test_a_named_parameter_that_may_not_change_is_refused(name, says):
    with pytest.raises(InvalidInput) as error:
        resumed(ppo, PPO(), PPO(clip=0.1)).changes(["algo.clip", name])
    assert re.match(says, str(error.value)), error.value


def test_a_checkpoint_without_parameters_is_refused_with_the_reason():
    """An earlier version saved none."""
    run = resumed(ppo, PPO(), PPO(clip=0.1))
    manifest = Manifest(STEP, "", dict(run.saved), {}, {}, {})
    old = ResumedRun(Checkpoint(Path("old"), manifest), run.saved, run.arguments, run.identity_of, {})
    with pytest.raises(InvalidInput, match="the version that wrote the checkpoint saved no parameters"):
        old.changes(["algo.clip"])
    assert old.changes([]) == ((), run.identity_of(run.arguments))


def test_an_earlier_resumes_change_may_be_named_but_need_not():
    """So the same command may be given again, and a retry goes on."""
    done = Change(2, "algo.clip", 0.2, 0.1)
    run = resumed(ppo, PPO(clip=0.1), PPO(clip=0.1), changes=(done,))
    assert run.changes([])[0] == run.changes(["algo.clip"])[0] == ()
    with pytest.raises(
        InvalidInput, match=r"^algo\.clip: got 0\.2, expected 0\.1, .* \(changed after 2 steps\); to ch"
    ):
        resumed(ppo, PPO(clip=0.1), PPO(), changes=(done,)).changes([])


def test_numbers_that_only_fit_together_can_change_together():
    before, now = (GRPO(overlong=Overlong(buffer=size, penalty=size / 4)) for size in (4, 8))
    names = ["algo.overlong.buffer", "algo.overlong.penalty"]
    changes, identity = resumed(grpo, before, now).changes(names)
    assert [change.parameter for change in changes] == names
    with pytest.raises(InvalidInput, match=r"^algo\.overlong\.penalty: got 2\.0, expected 1\.0"):
        resumed(grpo, before, now).changes(names[:1])


def test_a_lineage_leaves_out_plays_and_model_paths():
    """Arguments of a play may be secrets, and paths may differ."""
    play = Play(function="mine:play", max_tokens=8, arguments={"key": "sekrit"})
    assert parameters_of({"actor": {"path": "models/a", "head": "lm"}, "play": play, "n": (1, 2)}) == {
        "actor.head": "lm",
        "n": [1, 2],
    }
