"""The tokenizer of each row set follows from the calls that make and read its tokens."""

import pytest

from prefect_rlhf.engines.compute import Computed
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.graph import Dataset
from prefect_rlhf.placement.models.model import ModelSpec, TransformerShape
from prefect_rlhf.placement.rows.token_writers import speaking_role, token_writers
from prefect_rlhf.placement.rows.tokenizers import Tokenizers
from prefect_rlhf.tasks.settings import Settings
from prefect_rlhf.tasks.tracing.calls import compute, generate, inference
from prefect_rlhf.tasks.tracing.operations import computation
from prefect_rlhf.tasks.tracing.trace import trace_body

pytestmark = pytest.mark.quick

PLAIN = Settings()
SHAPE = TransformerShape(64, 128, 2, 4, 2, 16, 100, 64, 1e4, 1e-5, True)
ROLES = ("actor", "judge", "critic")


@computation("prompt_tokens")
def writes_prompts(*rows, settings):
    return Computed({"prompt_tokens": rows[0].columns["tokens"]})


@computation("tokens", "prompt_length")
def writes_rows(*rows, settings):
    return Computed(dict(rows[0].columns))


@computation("numbers")
def counts(*rows, settings):
    return Computed({"numbers": rows[0]["prompt_length"]})


def graph_of(body):
    names = body.__code__.co_varnames[: body.__code__.co_argcount]
    models = {role: ModelSpec(role, f"models/{role}", "lm", SHAPE) for role in ROLES if role in names}
    return trace_body(
        "some", body, {name: object() for name in names}, models, {"prompts": Dataset("prompts", ("prompt_tokens",), 8)}
    )


def tokenizers(graph, **alike):
    """All roles have tokenizers that differ, but for those that are stated to be alike."""
    folders = {model.role: model.path for model in graph.models}
    return Tokenizers(speaking_role(graph), folders, dict(token_writers(graph)), alike)


def judged(prompts, actor, judge):
    rollout = generate(actor, prompts, batch_size=4)
    case = compute(writes_prompts, rollout, longest=40, settings=PLAIN)
    verdict = generate(judge, case, name="verdict")
    compute(counts, rollout, settings=PLAIN, name="of_answers")
    compute(counts, verdict, settings=PLAIN, name="of_verdicts")
    compute(counts, rollout, verdict, settings=PLAIN, name="of_both")
    compute(counts, compute(counts, verdict, settings=PLAIN, name="first"), settings=PLAIN, name="of_numbers")


def test_rows_have_the_tokenizer_of_the_role_that_generated_them_or_reads_them():
    expected = {"prompts": "actor", "actor_generate": "actor", "writes_prompts": "judge", "verdict": "judge"}
    assert token_writers(graph_of(judged)) == {source: (role,) for source, role in expected.items()}


def test_a_judge_that_only_reads_rows_tokenised_for_it_is_their_writer():
    def infers(prompts, actor, judge):
        rows = compute(writes_rows, generate(actor, prompts, batch_size=4), longest=40, settings=PLAIN)
        inference(judge, rows, output="logprobs")

    assert token_writers(graph_of(infers))["writes_rows"] == ("judge",)


def test_tokens_that_no_model_reads_take_their_sources_or_readers_tokenizer():
    def in_two_steps(prompts, actor, judge):
        rollout = generate(actor, prompts, batch_size=4)
        draft = compute(writes_rows, rollout, longest=40, settings=PLAIN)
        generate(judge, compute(writes_prompts, draft, longest=40, settings=PLAIN))

    graph = graph_of(in_two_steps)
    assert token_writers(graph)["writes_rows"] == ("actor", "judge")
    assert tokenizers(graph, judge="actor").of_rows("writes_rows") == "models/actor"
    refused = tokenizers(graph).of_rows("writes_rows")
    assert isinstance(refused, InvalidInput)
    assert "rows of writes_rows: got 'the tokenizer of actor or judge'" in str(refused)


def test_rows_cut_from_a_roles_own_rows_have_its_tokenizer():
    def cut(prompts, actor):
        compute(writes_rows, generate(actor, prompts, batch_size=4), longest=40, settings=PLAIN)

    assert token_writers(graph_of(cut))["writes_rows"] == ("actor",)


@pytest.mark.parametrize(
    ("call", "folder"),
    [("of_answers", "models/actor"), ("of_verdicts", "models/judge"), ("verdict", "models/judge")],
)
def test_a_call_on_the_rows_of_a_role_has_its_tokenizer(call, folder):
    graph = graph_of(judged)
    assert tokenizers(graph).of_call(graph.call(call)) == folder


def test_a_computation_without_tokens_has_the_tokenizer_of_the_role_that_generated_its_rows():
    graph = graph_of(judged)
    assert tokenizers(graph).of_call(graph.call("of_numbers"), "judge") == "models/judge"
    assert tokenizers(graph).of_call(graph.call("of_numbers")) == "models/actor"


@pytest.mark.parametrize(
    ("call", "seen"),
    [
        ("of_both", "the tokenizers of actor (rows of actor_generate) and judge (rows of verdict)"),
        ("writes_prompts", "the tokenizers of actor (rows of actor_generate) and judge (tokens that it makes)"),
    ],
)
def test_two_tokenizers_in_a_computation_are_no_tokenizer_and_the_line_names_calls_and_roles(call, seen):
    graph = graph_of(judged)
    refused = tokenizers(graph).of_call(graph.call(call))
    assert str(refused) == (
        f"context.tokenizer: got '{seen}', expected context.tokenizers['actor'] or context.tokenizers['judge']; "
        "text_columns(rows) decodes each input with its own tokenizer"
    )
    assert tokenizers(graph, judge="actor").of_call(graph.call(call)) == "models/actor", "for tokenizers that are alike"


def test_prompts_are_the_datasets_unless_a_call_made_them():
    def several(prompts, actor):
        rollout = generate(actor, prompts, batch_size=4, samples=2)
        asked = compute(writes_prompts, rollout, longest=40, settings=PLAIN)
        generate(actor, asked, name="second")

    graph = graph_of(several)
    assert {call.name: graph.makes_prompts_of(call.rows) for call in graph} == {
        "actor_generate": False,
        "writes_prompts": True,
        "second": True,
    }
