"""The table of expected and measured turns: its numbers, and a step without answers."""

from prefect_rlhf.placement.graph import Dataset
from prefect_rlhf.placement.models.model import ModelSpec, TransformerShape
from prefect_rlhf.tasks.play import Play
from prefect_rlhf.tasks.reporting.turns import turn_rows
from prefect_rlhf.tasks.tracing.calls import generate
from prefect_rlhf.tasks.tracing.trace import trace_body

SHAPE = TransformerShape(64, 128, 2, 4, 2, 16, 100, 64, 1e4, 1e-5, True)
PLAY = Play(function="my_play.py:solve", max_tokens=9000, expected_turns=2.5, expected_answer_tokens=1000)


def rows(*steps):
    """Return expected and measured by what is counted."""

    def body(prompts, actor):
        generate(actor, prompts, batch_size=2, play=PLAY)

    stands = {name: type("Stand", (), {})() for name in ("prompts", "actor")}
    datasets = {"prompts": Dataset("prompts", ("prompt_tokens",), 3)}
    graph = trace_body("some", body, stands, {"actor": ModelSpec("actor", "actor", "lm", SHAPE)}, datasets)
    (call,) = graph
    of_call = [{f"{call.name}.{name}": value for name, value in step.items()} for step in steps]
    return {row["what"]: (row["expected"], row["measured"]) for row in turn_rows(graph, of_call)}


def test_large_token_counts_are_rounded_and_small_numbers_are_not():
    table = rows({"turns": 2.0, "observed_tokens": 1850.6, "answer_seconds": 0.5}, {"turns": 3.25})
    assert table == {
        "turns of a row": ("2.5", "2.62"),
        "tokens of a row's answers": ("1,500", "1,851"),
        "seconds of an answer": ("0.05", "0.5"),
    }
