"""Parameters of an algorithm have names: a call in Python that gives others is refused in a line."""

import inspect

import pytest

import prefect_rlhf as rl
from prefect_rlhf.algorithms import grpo

pytestmark = pytest.mark.quick

WRONG = {
    "a mapping": (
        lambda: rl.run(grpo, {"steps": 3}),
        "run: got {'steps': 3}, expected parameters by name; two stars name those of a mapping: run(**parameters)",
    ),
    "a model": (lambda: rl.run("grpo", "m0"), "run: got 'm0', expected parameters by name: run(actor=..., steps=...)"),
    "a dataset for a flow": (
        lambda: grpo("mine.jsonl"),
        "grpo: got 'mine.jsonl', expected parameters by name: grpo(actor=..., steps=...)",
    ),
    "a mapping for a flow": (
        lambda: grpo({"steps": 3}),
        "grpo: got {'steps': 3}, expected parameters by name; two stars name those of a mapping: grpo(**parameters)",
    ),
    "a misspelt parameter of a flow": (lambda: grpo(stepz=3), "stepz: unknown key (got 3); closest: steps"),
    "nothing for a flow": (
        lambda: grpo(steps=3),
        "actor, prompts, held_out: missing; expected a value for each: they have no default, such as actor: "
        "{path: ...}",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_call_without_names_is_refused_in_one_line(case):
    call, line = WRONG[case]
    with pytest.raises(rl.InvalidInput) as refused:
        call()
    assert str(refused.value) == line


def test_the_signature_of_run_has_one_argument_without_a_name():
    kinds = [each.kind for each in inspect.signature(rl.run).parameters.values()]
    assert kinds.count(inspect.Parameter.POSITIONAL_ONLY) == 1 and inspect.Parameter.VAR_POSITIONAL not in kinds
