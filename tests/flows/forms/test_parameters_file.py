"""The file of a run's parameters: the form reads the same run from it. What it cannot hold is refused."""

import inspect
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import SecretStr, TypeAdapter

from prefect_rlhf.errors.errors import InvalidInput, Missing
from prefect_rlhf.files.yaml_text import parse_yaml, to_yaml
from prefect_rlhf.flows.algorithm.places import ALGORITHMS
from prefect_rlhf.flows.algorithm.rlhf_flow import find_flow
from prefect_rlhf.flows.forms.check import checked_parameters, checked_value
from prefect_rlhf.flows.forms.left_out import LEFT_OUT, without_secrets
from prefect_rlhf.flows.forms.parameters_file import changed, plain_parameters
from prefect_rlhf.tasks.settings import Settings
from tests.support.cases import examples

MODEL, DATA = {"path": "models/tiny"}, {"path": "data/rows.jsonl"}
ROWS = ("prompts", "held_out", "pairs", "answers", "chats", "pretrain")
ODD_TEXTS = (
    "1e-5",
    "010",
    "yes",
    "null",
    "~",
    "1:30",
    "2026-11-27",
    " a ",
    "a: b",
    "# no",
    "two\nlines",
    "'",
    "ä\u2028",
)


def again(signature: inspect.Signature, plain: Mapping[str, Any]) -> dict[str, Any]:
    """Read the parameters from the text of their file, as `--parameters` does."""
    return checked_parameters(signature, parse_yaml("--parameters", "parameters.yaml", to_yaml(dict(plain))))


def values(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    """Values of a JSON schema; of a group some of its keys."""
    if "$ref" in schema:
        return values(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    if "enum" in schema or "const" in schema:
        return st.sampled_from(schema.get("enum", [schema.get("const")]))
    if branches := schema.get("anyOf") or schema.get("oneOf"):
        return st.one_of([values(each, definitions) for each in branches])
    kind = schema.get("type")
    if kind == "object" and "properties" in schema:
        known = {key: values(each, definitions) for key, each in schema["properties"].items() if key != "saved"}
        path = {"path": st.just("models/tiny")} if "path" in known else {}  # otherwise it is a saved block's
        return st.fixed_dictionaries(path, optional={key: each for key, each in known.items() if key not in path})
    if kind == "object":
        texts = st.text("abc", min_size=1, max_size=3) | st.sampled_from(ODD_TEXTS)
        return st.dictionaries(texts, values(schema.get("additionalProperties", {}), definitions), max_size=2)
    if kind == "array":
        return st.lists(values(schema.get("items", {}), definitions), max_size=2)
    if kind in ("integer", "number"):
        return numbers(schema)
    plain = {"null": st.none(), "boolean": st.booleans()}
    return plain.get(str(kind), st.sampled_from(ODD_TEXTS) | st.text("ab/.:1e-", min_size=1, max_size=8))


def numbers(schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    """Numbers within the bounds of a schema."""
    low = schema.get("minimum", schema.get("exclusiveMinimum", -100))
    high = min(schema.get("maximum", schema.get("exclusiveMaximum", 1000)), low + 1000)
    whole = st.integers(int(low), int(high))
    return whole if schema["type"] == "integer" else whole.map(float) | st.floats(low, high)


@cache
def distinct() -> dict[str, inspect.Parameter]:
    """The parameters of all shipped algorithms; of those with the same name, type and default, one."""
    of_all = [each for name in ALGORITHMS for each in inspect.signature(find_flow(name).fn).parameters.values()]
    return {str(each): each for each in of_all if each.name != "dry_run"}


@cache
def stated(shown: str) -> st.SearchStrategy[Any]:
    """Values that a person may state for a parameter, most of them valid."""
    schema = TypeAdapter(distinct()[shown].annotation).json_schema()
    return values(schema, schema.get("$defs", {}))


@settings(max_examples=examples(1200))
@given(shown=st.deferred(lambda: st.sampled_from(sorted(distinct()))), data=st.data())
def test_the_form_reads_the_same_value_from_the_file_for_each_parameter_of_every_algorithm(shown, data):
    """Whatever was stated: nothing of it looks like a secret, and no text is read as a number."""
    parameter = distinct()[shown]
    try:
        value = checked_value(parameter, data.draw(stated(shown)))
    except InvalidInput:  # of settings that do not go together
        assume(False)
    signature = inspect.Signature([parameter])
    plain = plain_parameters(signature, {parameter.name: value})
    assert LEFT_OUT not in to_yaml(plain)
    assert again(signature, plain) == {parameter.name: value}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_defaults_are_in_the_file_too(name):
    """A person looks for the learning rate and the size of a batch."""
    flow = find_flow(name)
    needed = [each for each, one in inspect.signature(flow.fn).parameters.items() if one.default is one.empty]
    stated = {each: DATA if each in ROWS else MODEL for each in needed}
    plain = plain_parameters(inspect.signature(flow.fn), flow.validate_parameters(stated))
    assert set(plain) == set(inspect.signature(flow.fn).parameters) - {"dry_run"}
    named = [field for field, _, _ in changed({}, {"algo": plain["algo"]})]
    assert named == ["algo"]
    assert {"batch_size"} < set(plain["algo"])
    assert any("lr" in group for group in plain["algo"].values() if isinstance(group, dict))


SECRETS = {
    "arguments": {
        "servers": {
            "db": {"command": "serve", "args": ["--api-key", "s1", "--token=s2", "-v"], "env": {"WORD": "s3"}},
            "web": {"url": "https://me:s4@host/mcp", "headers": {"X": "s5"}},
            "other": {"url": "https://host/mcp?api_key=s6", "timeout": 5},
        },
        "password": "s7",
        "said": "Bearer s8",
        "note": "key is s9-of-a-variable",
    }
}


@pytest.fixture
def secret_variable(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "s9-of-a-variable")


def test_no_secret_is_in_the_file_and_the_other_values_are(secret_variable):
    text = to_yaml(without_secrets(SECRETS))
    assert not [number for number in range(1, 10) if f"s{number}" in text]
    left = without_secrets(SECRETS)["arguments"]
    assert left["servers"]["db"]["command"] == "serve" and left["servers"]["db"]["args"][3] == "-v"
    assert left["servers"]["other"]["timeout"] == 5


def test_names_that_only_look_like_secrets_stay():
    """The keys of these groups are names that a person chose; an end-of-sequence token is no credential."""
    plain = {"columns": {"key": "answer_key"}, "chat_template_kwargs": {"token": "<s>"}, "eos_token": "</s>"}
    assert without_secrets(plain | {"max_tokens": 5, "stop_at_eos": True}) == plain | {
        "max_tokens": 5,
        "stop_at_eos": True,
    }


def test_a_value_that_the_file_left_out_is_refused_until_it_is_given(secret_variable):
    """No run takes the text, or a default, for the secret."""
    flow, rows = find_flow("grpo"), {"path": "data/rows.jsonl"}
    play = {"function": "a:b", "max_tokens": 8, "signature": "gymnasium", "arguments": {"api_key": "s1"}}
    stated = {"prompts": rows, "held_out": rows, "actor": {"path": "models/tiny"}, "play": play}
    plain = plain_parameters(inspect.signature(flow.fn), flow.validate_parameters(stated))
    with pytest.raises(Missing) as refused:
        again(inspect.signature(flow.fn), plain)
    field = "play.arguments.api_key"
    assert str(refused.value) == (
        f"{field}: missing; expected its value, which the file left out: a secret; -p {field}=VALUE"
    )
    plain["play"]["arguments"]["api_key"] = "s1"
    assert again(inspect.signature(flow.fn), plain)["play"].arguments == {"api_key": "s1"}


class Cursor:
    """A type of a person's own that YAML cannot hold."""


class Word(Settings):
    """Settings of a person's own, with a secret type of pydantic."""

    word: SecretStr = SecretStr("none")


def test_an_object_that_yaml_cannot_hold_is_refused_with_its_type():
    """Also an object that would be read as another value."""

    def parameter(kind):
        return inspect.Parameter("mine", inspect.Parameter.KEYWORD_ONLY, annotation=kind)

    for kind, value in ((Any, Cursor()), (Any, float("nan")), (Word, Word(word=SecretStr("s1"))), (Any, Word())):
        signature = inspect.Signature([parameter(kind)])
        plain = plain_parameters(signature, {"mine": value})
        assert "s1" not in to_yaml(plain)
        with pytest.raises(Missing, match=f"mine: missing; .* a {type(value).__name__}; -p mine=VALUE"):
            again(signature, plain)


def test_a_run_of_epochs_has_no_steps_in_its_file():
    signature = inspect.signature(find_flow("sft").fn)
    given = {"chats": DATA, "held_out": DATA, "actor": MODEL, "epochs": 2}
    plain = plain_parameters(signature, find_flow("sft").validate_parameters(given))
    assert plain["epochs"] == 2 and "steps" not in plain


def test_the_fields_of_a_saved_block_are_in_the_file_so_that_it_is_not_asked_again():
    """It may have changed since, or its server may be another."""
    parameter = inspect.signature(find_flow("grpo").fn).parameters["actor"]
    model = parameter.annotation.__origin__(path="models/tiny", dtype="float32", saved="smollm2")
    signature = inspect.Signature([parameter])
    plain = plain_parameters(signature, {"actor": model})
    assert (plain["actor"]["path"], plain["actor"]["dtype"]) == ("models/tiny", "float32")
    assert again(signature, plain) == {"actor": model}
