"""What a failure is due to: a response may cure it, or none can because the code or the row is wrong."""

import asyncio

import of_mistakes
import pytest
from host_cases import function

from prefect_rlhf.engines.functions.call import LoopDelay, call, call_async
from prefect_rlhf.engines.functions.load import load
from prefect_rlhf.engines.functions.message import line_of
from prefect_rlhf.engines.functions.scoring.hand import read
from prefect_rlhf.engines.functions.scoring.messages import Done

CHAT = [{"role": "user", "content": "say it"}]
ROW = {
    "prompt": CHAT,
    "response": "the film",
    "answer": "a film",
    "number": 2,
    "nothing": None,
    "words": ["the", "film"],
    "facts": {"year": 2001, "list": [{"name": "a film"}]},
    "data_source": "films",
    "ground_truth": "a film",
    "extra_info": {"index": 2},
    "entry": {"question": "what", "answer": "a film", "metadata": {"difficulty": 3}},
}


def verdict_of(name, signature="row", row=ROW):
    loaded = load(function(name, signature, "of_mistakes"))
    if loaded.asynchronous:
        (verdict,) = asyncio.run(call_async(loaded, [row], 60.0, LoopDelay()))
    else:
        with asyncio.Runner() as runner:
            (verdict,) = call(loaded, [row], runner)
    assert verdict.failed and read(line_of(Done(0, (verdict,)))) == Done(0, (verdict,))
    return verdict


@pytest.mark.parametrize(("name", "blame"), [(each.__name__, blame) for each, blame in of_mistakes.NEVER.items()])
def test_errors_that_no_response_can_cure_are_recognised(name, blame):
    assert verdict_of(name).blame == blame, verdict_of(name).failed


def test_a_call_of_a_wrapped_function_with_other_arguments_is_known():
    """The wrapper takes any, so that the import does not see it."""
    assert verdict_of("wrapped_with_two_arguments").blame == "code"


@pytest.mark.parametrize("name", [each.__name__ for each in of_mistakes.MAYBE])
def test_what_another_response_may_cure_is_due_to_the_response(name):
    """Also a written key of a dict that was made from the response, and code that the response is."""
    assert verdict_of(name).blame == "response", verdict_of(name).failed


@pytest.mark.parametrize(
    ("signature", "name", "blame"), [(sign, each.__name__, blame) for sign, each, blame in of_mistakes.OF_SIGNATURES]
)
def test_columns_of_each_signature_are_known(signature, name, blame):
    assert verdict_of(name, signature).blame == blame, verdict_of(name, signature).failed


def test_a_struct_that_lacks_the_truth_of_a_verl_row_is_known():
    row = {name: value for name, value in ROW.items() if name != "ground_truth"} | {"reward_model": {"style": "rule"}}
    verdict = verdict_of("verl_of_the_text", "verl", row)
    assert verdict.failed.startswith("KeyError: 'ground_truth'") and verdict.blame == "row"
