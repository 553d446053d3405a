"""Files that fit two formats, and rows of no format, are refused in a line that says what to set or to correct."""

import json

import pytest

from prefect_rlhf.blocks.chats import Chats
from prefect_rlhf.blocks.dataset import Preferences, Prompts
from prefect_rlhf.blocks.rated_answers import RatedAnswers
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.flows.training.inputs import open_source
from tests.tasks.data.formats.test_found_formats import ALPACA, KINDS, TURNS, gpt, human
from tests.tasks.data.stored import ask, json_lines, say

pytestmark = pytest.mark.quick

BOTH = [ask("Hi"), say("Hello")]

TWO_FORMATS = {
    "messages and conversations": (
        Chats,
        {"messages": BOTH, "conversations": TURNS},
        "data.form: missing; expected messages or sharegpt: FILE fits messages (messages) and ShareGPT (conversations)",
        "sharegpt",
    ),
    "prompts in both": (
        Prompts,
        {"messages": BOTH[:1], "conversations": TURNS[:1]},
        "data.form: missing; expected sharegpt or messages: FILE fits ShareGPT (conversations) and messages (messages)",
        "messages",
    ),
    "tatsu-lab/alpaca": (
        Chats,
        {**ALPACA, "text": "Below is an instruction"},
        "data.form: missing; expected text or alpaca: FILE fits texts (text) and Alpaca (instruction, output, input)",
        "alpaca",
    ),
    "a conversation and its text": (
        Chats,
        {"conversations": TURNS, "text": "Hi Hello"},
        "data.form: missing; expected text or sharegpt: FILE fits texts (text) and ShareGPT (conversations)",
        "text",
    ),
    "OpenR1-Math": (
        Prompts,
        {"problem": "1 + 2?", "messages": BOTH[:1]},
        "data.form: missing; expected messages or question: FILE fits messages (messages) and question and"
        " answer (problem)",
        "question",
    ),
    "two contexts of a pair": (
        Preferences,
        {"conversations": TURNS[:1], "instruction": "Hi", "chosen": "a", "rejected": "b"},
        "data.form: missing; expected sharegpt or alpaca: FILE fits ShareGPT (conversations, chosen,"
        " rejected) and Alpaca"
        " (instruction, chosen, rejected)",
        "alpaca",
    ),
}


@pytest.mark.parametrize("case", TWO_FORMATS)
def test_a_file_that_fits_two_formats_is_refused_until_form_is_set(stored, qwen, case):
    kind, row, says, form = TWO_FORMATS[case]
    path = stored(row)
    with pytest.raises(InvalidInput) as refused:
        open_source("data", kind(path=path, split_column=None), qwen).check(max_tokens=4096)
    assert str(refused.value) == says.replace("FILE", path)
    source = open_source("data", kind(path=path, split_column=None, form=form), qwen)
    source.check(max_tokens=4096)
    assert source.rows.found.form == form


TWO_COLUMNS = {
    "questions": (
        Prompts,
        {"question": "a", "problem": "b"},
        "data.prompt_column: missing; expected question or problem",
    ),
    "answers": (
        Chats,
        {"question": "a", "solution": "b", "answer": "c"},
        "data.completion_column: missing; expected answer or solution",
    ),
}


def test_pairs_are_no_rated_answers(stored, qwen):
    """TRL's KTO makes two rows of each pair."""
    path = stored({"prompt": "a", "chosen": "b", "rejected": "c"})
    says = r"^answers: got 'pairs \(chosen, rejected\) in .*, expected a row for each answer, .*dpo learns from pairs$"
    with pytest.raises(InvalidInput, match=says):
        open_source("answers", RatedAnswers(path=path, split_column=None), qwen).check(max_tokens=4096)


@pytest.mark.parametrize("case", TWO_COLUMNS)
def test_two_columns_that_may_be_the_same_part_are_refused(stored, qwen, case):
    kind, row, says = TWO_COLUMNS[case]
    path = stored(row)
    with pytest.raises(InvalidInput) as refused:
        open_source("data", kind(path=path, split_column=None), qwen).check(max_tokens=4096)
    assert str(refused.value) == f"{says}: {path} has both"


STATED = {
    "messages": (
        {"messages": BOTH, "conversations": TURNS},
        {"messages_column": "conversations"},
        "messages (conversations)",
    ),
    "a completion": (
        {"instruction": "a", "output": "b", "text": "c"},
        {"prompt_column": "instruction", "completion_column": "output"},
        "completions (instruction, output)",
    ),
    "a text": ({**ALPACA, "messages": BOTH}, {"text_column": "output"}, "texts (output)"),
}


@pytest.mark.parametrize("case", STATED)
def test_stated_columns_win(stored, qwen, case):
    row, settings, described = STATED[case]
    path = stored(row)
    source = open_source("chats", Chats(path=path, split_column=None, **settings), qwen)
    source.check(max_tokens=4096)
    assert source.rows.remark == f"chats: {path} is read as {described}"


def test_alpaca_is_plain_text_if_its_columns_are_stated(stored, qwen):
    """The format itself is a chat; that takes a template."""
    columns = {"prompt_column": "instruction", "completion_column": "output"}
    source = open_source("chats", Chats(path=stored(ALPACA), split_column=None, **columns), qwen)
    source.check(max_tokens=4096)
    assert not source.goes_through_template


WRONG_SETTINGS = {
    "a form without its columns": (
        {"form": "alpaca"},
        r"^chats.form: got 'alpaca', expected a form of the file: alpaca needs instruction and output or"
        r" response, and .*"
        r" has conversations$",
    ),
    "a form and a column": (
        {"form": "sharegpt", "messages_column": "chat"},
        r"^chats.messages_column: 'chat' is not used: form is sharegpt, which reads its own columns; remove it$",
    ),
    "our own form and a column of another": (
        {"form": "messages", "messages_column": "conversations", "text_column": "body"},
        r"^chats.text_column: 'body' is not used: form is messages, which reads conversations; remove it$",
    ),
    "our own form and both columns of another": (
        {"form": "text", "text_column": "conversations", "prompt_column": "q", "completion_column": "a"},
        r"^chats.prompt_column: 'q' is not used: form is text, which reads conversations; remove it$",
    ),
    "a column that is not there": (
        {"messages_column": "chat"},
        r"^chats.messages_column: got 'chat', expected a column of",
    ),
}


@pytest.mark.parametrize("case", WRONG_SETTINGS)
def test_a_form_and_columns_that_do_not_fit_the_file_are_refused(stored, qwen, case):
    settings, says = WRONG_SETTINGS[case]
    with pytest.raises(InvalidInput, match=says):
        open_source("chats", Chats(path=stored({"conversations": TURNS}), split_column=None, **settings), qwen).check(
            99
        )


LIST_OF_TURNS = "expected a list of turns in each row, such as {from, value} or {role, content}, in FILE as in ShareGPT"
NEARLY = {
    "conversations as text": (
        Prompts,
        {"conversations": "[{'from': 'human', 'value': 'Hi'}]"},
        f"data.conversations: got 'text', {LIST_OF_TURNS}",
    ),
    "a list in a list": (
        Chats,
        {"conversations": [TURNS]},
        f"data.conversations: got 'list', {LIST_OF_TURNS}",
    ),
    "answers as numbers": (
        Chats,
        {"question": "1 + 2?", "answer": 3},
        "data.answer: got 'numbers', expected text (in JSON lines, quote the numbers), in FILE as in question and "
        "answer",
    ),
    "no label": (
        RatedAnswers,
        ALPACA,
        "data.path: got 'FILE', expected a file with a column label or kto_tag beside those of Alpaca; it has "
        "instruction, input, output",
    ),
}


@pytest.mark.parametrize("case", NEARLY)
def test_a_file_that_is_nearly_a_format_is_refused_with_the_part_that_it_lacks(tmp_path, qwen, case):
    """Rather than with the names of our own columns, which its author does not know."""
    parameter, row, says = NEARLY[case]
    path = json_lines(tmp_path / "rows.jsonl", row)
    with pytest.raises(InvalidInput) as refused:
        open_source("data", parameter(path=path, split_column=None), qwen).check(99)
    assert str(refused.value).replace(path, "FILE") == says


def test_a_stated_column_that_the_first_row_rules_out_is_refused(stored, qwen):
    """Both columns are in the file; a row has a value in one of them alone."""
    path = stored({"chat": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}], "body": None})
    chats = Chats(path=path, split_column=None, messages_column="chat", text_column="body")
    says = r"^chats.text_column: 'body' is not used: .* is read as messages, which reads chat; remove it$"
    with pytest.raises(InvalidInput, match=says):
        open_source("chats", chats, qwen).check(99)


def turns(*values):
    return {"conversations": list(values)}


OTHER_ROWS = {
    "messages after conversations": (
        [{"conversations": TURNS}, {"conversations": TURNS}, {"messages": BOTH}],
        "chats row 2: got 'messages', expected conversations, as in row 0: all rows of FILE must have the same format",
    ),
    "a pair after a completion": (
        [{"prompt": "a", "completion": "b"}, {"instruction": "a", "output": "b"}],
        "chats row 1: got 'instruction, output', expected prompt, completion, as in row 0: all rows of FILE"
        " must have the"
        " same format",
    ),
    "text among messages": (
        [{"messages": BOTH}, {"messages": [{"role": "user", "text": "a"}]}],
        "chats row 1 messages turn 0: got {'role': 'user', 'text': 'a'}, expected {from, value} or {role,"
        " content}, in FILE",
    ),
    "messages among turns are turns": ([turns(*TURNS), turns(*BOTH)], None),
    "an unknown name": (
        [turns(*TURNS), turns(human("Hi"), {"from": "bot", "value": "Hello"})],
        "chats row 1 conversations turn 1 from: got 'bot', expected one of system, human, user, gpt,"
        " assistant, chatgpt,"
        " model, function_call, tool_call, observation, tool, tool_response, function_response, in FILE",
    ),
    "two questions in a row": (
        [turns(human("Hi"), human("Hello"), gpt("a"))],
        "chats row 0 conversations turn 1 from: got 'human after human', expected gpt or function_call; correct "
        "or remove the row, in FILE",
    ),
    "an answer first": (
        [turns(*TURNS), turns(gpt("Hello"), human("Hi"), gpt("a"))],
        "chats row 1 conversations turn 0 from: got 'gpt as the first turn', expected system or human; correct "
        "or remove the row, in FILE",
    ),
    "a system turn in between": (
        [turns(human("Hi"), {"from": "system", "value": "a"})],
        "chats row 0 conversations turn 1 from: got 'system after human', expected gpt or function_call; correct or "
        "remove the row, in FILE",
    ),
    "an answer to a call": (
        [turns(human("Hi"), {"from": "function_call", "value": '{"name": "a", "arguments": {}}'}, gpt("b"))],
        "chats row 0 conversations turn 2 from: got 'gpt after function_call', expected observation; correct or remove "
        "the row, in FILE",
    ),
    "a call that is no JSON": (
        [turns(human("Hi"), {"from": "function_call", "value": "add(1, 2)"})],
        "chats row 0 conversations turn 1 value: got 'add(1, 2)', expected JSON of a call, {name,"
        " arguments}, or of a list"
        " of calls, in FILE",
    ),
    "no turns": ([turns(*TURNS), turns()], "chats row 1 conversations: got [], expected at least one turn, in FILE"),
    "null turns": (
        [turns(*TURNS), {"conversations": None, "id": 1}],
        "chats row 1 conversations: got None, expected at least one turn, in FILE",
    ),
    "a null value": (
        [turns(*TURNS), turns(human("Hi"), gpt(None))],
        "chats row 1 conversations turn 1 value: got None, expected text that is not empty, in FILE",
    ),
    "no answer": (
        [turns(*TURNS), turns(human("Hi"))],
        "chats row 1 messages: got 'nothing to learn', expected a message of the assistant, or two tokens of"
        " text, in FILE",
    ),
    "no instruction": (
        [ALPACA, {**ALPACA, "instruction": ""}],
        "chats row 1 instruction: got '', expected text that is not empty, in FILE",
    ),
    "no output": (
        [ALPACA, {**ALPACA, "output": None}],
        "chats row 1 output: got None, expected text that is not empty, in FILE",
    ),
    "an answer that is half learnt": (
        [turns(human("Hi"), {**gpt("Hello"), "weight": 0.5})],
        "chats row 0 messages message 1 weight: got 0.5, expected true or false, or 1 or 0, in FILE",
    ),
    "no answer that is learnt": (
        [{"messages": [ask("Hi"), {**say("Hello"), "train": False}]}],
        "chats row 0 messages: got 'nothing to learn', expected a message of the assistant, or two tokens of"
        " text, in FILE",
    ),
    "a role that the template leaves out": (
        [{"messages": [ask("Hi"), {"role": "function", "content": "7"}, say("Hello")]}],
        "chats row 0 messages message 1 role: got 'function', expected a role that the chat template writes, such as"
        " user; the chat template of MODEL leaves out messages of this role, in FILE",
    ),
    "half a history": (
        [{**ALPACA, "history": [["Hi"]]}],
        "chats row 0 history: got [['Hi']], expected pairs of a question and its answer, in FILE",
    ),
}


@pytest.mark.parametrize("case", OTHER_ROWS)
def test_a_row_of_another_format_or_order_is_refused_with_its_number(tmp_path, qwen, case):
    rows, says = OTHER_ROWS[case]
    path = json_lines(tmp_path / "c.jsonl", *rows)
    source = open_source("chats", Chats(path=path, split_column=None), qwen)
    if says is None:
        source.check(max_tokens=4096)
        return
    with pytest.raises(InvalidInput) as refused:
        source.check(max_tokens=4096)
    assert str(refused.value) == says.replace("FILE", path).replace("MODEL", qwen)


@pytest.mark.parametrize("write", [json.dumps, str], ids=["json", "python"])
def test_a_column_with_the_text_of_messages_is_refused(stored, qwen, write):
    """As a spreadsheet or a database has them. An answer may be such a list of other objects."""
    text = write([ask("Hi")])
    rows = {
        "prompt": (Prompts, {"prompt": text}),
        "chosen": (Preferences, {"prompt": "Hi", "chosen": text, "rejected": "no"}),
        "completion": (Chats, {"prompt": "Hi", "completion": text}),
    }
    for column, (kind, row) in rows.items():
        path = stored(row, name=column)
        with pytest.raises(InvalidInput, match=rf"^data row 0 {column}: got .*, expected messages, not their text"):
            open_source("data", kind(path=path, split_column=None), qwen).check(max_tokens=4096)
    others = write([{"role": "admin", "content": 1}])
    path = stored({"prompt": "Hi", "completion": others}, name="others")
    open_source("data", Chats(path=path, split_column=None), qwen).check(max_tokens=4096)


def test_a_prompt_that_ends_with_an_answer_is_refused_or_stripped(stored, qwen):
    path = stored({"conversations": TURNS})
    with pytest.raises(InvalidInput, match=r"^prompts row 0: .* or set last_answer to strip"):
        open_source("prompts", Prompts(path=path, split_column=None), qwen).check(max_tokens=4096)
    source = open_source("prompts", Prompts(path=path, split_column=None, last_answer="strip"), qwen)
    source.check(max_tokens=4096)


@pytest.mark.parametrize(
    ("kind", "row", "says"),
    [
        (
            Preferences,
            {"conversations": TURNS, "chosen": gpt("a"), "rejected": gpt("b")},
            r"^data row 0: .*an answer at",
        ),
        (
            RatedAnswers,
            {"conversations": TURNS[:3], "label": True},
            r"^data row 0 conversations: .*ends with an answer, which the label rates",
        ),
    ],
)
def test_conversations_must_all_include_the_answer_or_all_leave_it_out(stored, qwen, kind, row, says):
    path = stored(row, {**row, "label": False} if "label" in row else row)
    with pytest.raises(InvalidInput, match=says):
        open_source("data", kind(path=path, split_column=None), qwen).check(max_tokens=4096)


def test_a_chat_format_needs_a_template(stored, tokenizer_without_template):
    with pytest.raises(
        InvalidInput, match=r"^chats.chat_template: got .*, expected a tokenizer that has a chat template"
    ):
        open_source("chats", Chats(path=stored(ALPACA), split_column=None), tokenizer_without_template).check(99)


@pytest.mark.parametrize("kind", KINDS)
def test_unread_columns_are_logged(tmp_path, qwen, kind):
    row = {"conversations": TURNS[:1], "chosen": gpt("a"), "rejected": gpt("b"), "label": True, "images": ["a.png"]}
    path = json_lines(tmp_path / "c.json", row)
    source = open_source("data", KINDS[kind](path=path, split_column=None), qwen)
    assert source.rows.remark.endswith("; images is not read")


def test_a_form_that_reads_the_system_prompt_is_logged(tmp_path, qwen):
    """`jondurbin/truthy-dpo-v0.1` has one beside a `prompt`, which is plain text in our own columns."""
    row = {"system": "Be short.", "prompt": "Who?", "chosen": "Ann.", "rejected": "Bob."}
    path = json_lines(tmp_path / "p.jsonl", row)
    remark = open_source("pairs", Preferences(path=path, split_column=None), qwen).rows.remark
    assert remark.endswith("; system is not read (with form: question, the system prompt is)")
    named = open_source("pairs", Preferences(path=path, split_column=None, form="question"), qwen)
    assert named.rows.remark.endswith("question and answer (prompt, chosen, rejected, system)")


def test_the_key_of_a_files_list_is_logged(tmp_path, qwen):
    (tmp_path / "c.json").write_text(json.dumps({"data": [ALPACA]}))
    source = open_source("chats", Chats(path=str(tmp_path / "c.json"), split_column=None), qwen)
    assert source.rows.remark.endswith(
        "c.json is read as Alpaca (instruction, output, input); the rows are the list 'data' of the file"
    )
