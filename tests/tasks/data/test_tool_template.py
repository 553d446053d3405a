"""The template that `prefect-rlhf init` writes, and the setting that names it: tools for a model that ignores them."""

import json
from dataclasses import replace

import pytest
from transformers import AutoTokenizer
from transformers.utils import get_json_schema

from prefect_rlhf.engines.functions.signatures.tool_calls import ToolCall, calls_in
from prefect_rlhf.engines.sampling.chats.answer_end import answer_end, end_tokens
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.tasks.data.chats import ChatDataset
from prefect_rlhf.tasks.data.datasets import PromptDataset
from prefect_rlhf.tasks.data.tokenizer import load_tokenizer, read_template
from prefect_rlhf.tasks.data.tools import ShownTools
from tests.engines.functions.of_tools import add
from tests.engines.sampling.stand_ins import OF_INIT, stand_in, template
from tests.tasks.small_tokenizer import save_small_tokenizer

pytestmark = pytest.mark.quick

OF_SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The template of the model that README.md fetches."""
TOOLS = [get_json_schema(add)]
SYSTEM = {"role": "system", "content": "Be short."}
ASKED = {"role": "user", "content": "is the film good?"}
GOOD = {"role": "assistant", "content": "it is good"}
FILM, BEST = ({"role": "tool", "content": content} for content in ("the film", '{"best": 1}'))


def called(*arguments, content="", in_text=False):
    calls = [
        {"type": "function", "function": {"name": "add", "arguments": json.dumps(one) if in_text else one}}
        for one in arguments
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls}


@pytest.fixture
def folder(tmp_path):
    """A model whose own template ignores tools."""
    folder = stand_in("tools", tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = OF_SMOLLM2
    tokenizer.save_pretrained(folder)
    return folder


def written(folder, text, chat, **settings):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return tokenizer.apply_chat_template(chat, chat_template=text, tokenize=False, **settings)


def rows_of(folder, chat):
    """A file with a chat and a column of tools."""
    (folder / "chats.jsonl").write_text(json.dumps({"messages": chat, "tools": TOOLS}) + "\n")
    return str(folder / "chats.jsonl")


@pytest.mark.parametrize("opens", [True, False])
@pytest.mark.parametrize(
    "chat", [[ASKED], [SYSTEM, ASKED], [ASKED, GOOD], [SYSTEM, ASKED, GOOD, ASKED], [ASKED, SYSTEM]]
)
def test_a_chat_without_tools_is_rendered_like_smollm2s(folder, chat, opens):
    texts = [written(folder, text, chat, add_generation_prompt=opens) for text in (OF_INIT.read_text(), OF_SMOLLM2)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    "chat",
    [
        [ASKED],
        [SYSTEM, ASKED],
        [ASKED, called({"a": 1, "b": 2}), FILM, GOOD],
        [ASKED, called({"a": 1, "b": 2}, {"a": 3, "b": "naïve"}), FILM, BEST, GOOD],
        [ASKED, called({"a": 1}, content="let me see"), FILM, called({"b": 2}), BEST, GOOD, ASKED],
    ],
)
def test_tools_calls_and_answers_are_rendered_like_qwen_2_5s(folder, chat):
    """But for the system message of a chat that has none, which is that of SmolLM2."""
    ours, of_qwen = (
        written(folder, text, chat, tools=TOOLS, add_generation_prompt=True)
        for text in (OF_INIT.read_text(), template("qwen2_5"))
    )
    own = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    assert ours == of_qwen.replace("You are Qwen, created by Alibaba Cloud. You are a helpful assistant.", own)


def test_arguments_may_be_json_text_and_content_may_be_missing(folder):
    """As OpenAI's API has them."""
    call = called({"a": 1}, in_text=True)
    for content in ({"content": None}, {}):
        turn = {key: value for key, value in call.items() if key != "content"} | content
        text = written(folder, OF_INIT.read_text(), [ASKED, turn])
        assert text == written(folder, OF_INIT.read_text(), [ASKED, called({"a": 1})])
        assert '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>' in text


def test_a_play_with_tools_accepts_this_template_and_suggests_it_otherwise(folder, tmp_path):
    rows = tmp_path / "prompts.jsonl"
    rows.write_text(json.dumps({"prompt": [ASKED]}) + "\n")
    shown = ShownTools(json.dumps(TOOLS), "hermes")
    source = PromptDataset("prompts", str(rows), folder, split_column=None, tools=shown)
    says = (
        r"play.tools: got 'add', expected a chat template that shows tools; the chat template of .* ignores them: set "
        r"the model's chat_template, as in actor.chat_template: tools.jinja \(prefect-rlhf init writes it\), or use "
        "signature play"
    )
    with pytest.raises(InvalidInput, match=says):
        source.check(max_tokens=4096)
    of_init = replace(source, template=OF_INIT.read_text())
    longest = of_init.check(max_tokens=4096).longest
    (tokens,) = of_init.read([0])["prompt_tokens"]
    text = written(folder, OF_INIT.read_text(), [ASKED], tools=TOOLS, add_generation_prompt=True)
    assert tokens == AutoTokenizer.from_pretrained(folder)(text, add_special_tokens=False)["input_ids"]
    assert longest == len(tokens)
    assert of_init.remarks()[0].startswith("prompts: the setting chat_template renders a prompt as ")
    with pytest.raises(InvalidInput, match="play.tool_format: got 'llama3', expected hermes"):
        replace(of_init, tools=replace(shown, written_as="llama3")).check(max_tokens=4096)


def test_a_template_of_marks_that_the_tokenizer_lacks_is_a_warning(tmp_path):
    """Such as the template of init for a Mistral, whose tokenizer would split <|im_end|>: no answer would end there."""
    source = ChatDataset("chats", rows_of(tmp_path, [ASKED, GOOD]), save_small_tokenizer(tmp_path), split_column=None)
    of_init = replace(source, template=OF_INIT.read_text())
    (line, *_) = of_init.warnings()
    assert line == (
        "chats: the setting chat_template writes <|im_start|> and <|im_end|>, no tokens of "
        f"{tmp_path}: is it the template of another model?"
    )
    assert not any("another model" in line for line in source.warnings())


DATED = (
    "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}{{ date_string }}"
)


@pytest.mark.parametrize(
    ("begin", "remedy"),
    [
        (DATED, "chats.chat_template_kwargs: {date_string: 1 Jan 2026} fixes it"),
        ("{{ strftime_now('%d %b %Y') }}", "another chat_template fixes it"),
    ],
)
def test_a_template_that_writes_todays_date_is_a_warning(folder, tmp_path, begin, remedy):
    """A run that passes midnight, or is resumed on another day, would read other prompts."""
    rows = rows_of(tmp_path, [ASKED, GOOD])
    source = ChatDataset("chats", rows, folder, split_column=None, template=begin + OF_SMOLLM2, tools_column=None)
    (line,) = (line for line in source.warnings() if "date" in line)
    changes = "so its tokens change at midnight, also in a resumed run"
    assert line == f"chats: the setting chat_template writes today's date, {changes}; {remedy}"
    fixed = replace(source, chat_template_kwargs={"date_string": "26 Jul 2024"})
    assert any("date" in line for line in fixed.warnings()) == (begin != DATED)
    assert not any("date" in line for line in replace(source, template=OF_SMOLLM2).warnings())


def test_chats_with_a_column_of_tools_are_refused_with_the_remedy(folder, tmp_path):
    source = ChatDataset("chats", rows_of(tmp_path, [ASKED, GOOD]), folder, split_column=None)
    says = "chats.tools_column: got 'tools', expected null, or a .* ignores them: set the model's chat_template, as in"
    with pytest.raises(InvalidInput, match=says):
        source.check(max_tokens=4096)


@pytest.mark.parametrize("family", ["tools", "qwen2_5"])
def test_chats_with_calls_are_learnt_in_the_form_that_plays_parse(folder, tmp_path, family):
    """Also several calls of a turn, whose answers are one message of the template. Answers of tools are not learnt."""
    chat = [ASKED, called({"a": 1, "b": 2}, {"a": 3, "b": 4}), FILM, BEST, called({"a": 5, "b": 6}), FILM, GOOD]
    source = ChatDataset("chats", rows_of(tmp_path, chat), folder, split_column=None, template=template(family))
    source.check(max_tokens=4096)
    tokenizer, row = AutoTokenizer.from_pretrained(folder), source.read([0])
    (tokens,), (mask,) = row["tokens"], row["mask"]
    learnt = zip(tokens[len(tokens) - len(mask) :], mask, strict=True)
    first, second, third = (
        f'<tool_call>\n{{"name": "add", "arguments": {{"a": {a}, "b": {a + 1}}}}}\n</tool_call>' for a in (1, 3, 5)
    )
    turns = tokenizer.decode([token for token, is_learnt in learnt if is_learnt]).split("<|im_end|>")
    assert turns == [f"{first}\n{second}", third, "it is good", ""]
    assert list(calls_in(turns[0], "hermes")) == [ToolCall("add", {"a": 1, "b": 2}), ToolCall("add", {"a": 3, "b": 4})]
    whole = written(folder, template(family), chat, tools=TOOLS)
    assert tokenizer.decode(tokens) == whole.removesuffix("\n")


def test_the_setting_decides_the_end_of_an_answer(folder):
    """A template without an end leaves it to the tokenizer; the folder's own template has no say."""
    tokenizer = load_tokenizer(folder, OF_INIT.read_text())
    assert str(answer_end(tokenizer)).endswith(", from the chat template")
    assert end_tokens(folder, None, OF_INIT.read_text())[0] == tokenizer.convert_tokens_to_ids("<|im_end|>")
    other = OF_INIT.read_text().replace("<|im_end|>", "<|endoftext|>")
    assert end_tokens(folder, None, other)[0] == tokenizer.convert_tokens_to_ids("<|endoftext|>")
    assert end_tokens(folder)[0] == tokenizer.convert_tokens_to_ids("<|im_end|>")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (
            None,
            "expected a file with a chat template in Jinja, such as tools.jinja, which prefect-rlhf init writes .*No",
        ),
        (b"", r"which prefect-rlhf init writes \(it is empty\)"),
        (b"\xff\xfe", r"which prefect-rlhf init writes \('utf-8' codec"),
        (b"{% for m in messages %}\n{{ m.content }", r"which prefect-rlhf init writes \(line 2: unexpected '}'\)"),
        (b"{% for m in messages %}{{ m.content }}", r"init writes \(line 1: Unexpected end of template"),
        (b" " * (1 << 20) + b"x", r"which prefect-rlhf init writes \(.*more than 1048576 bytes"),
    ],
)
def test_a_file_without_a_template_is_refused_in_one_line(folder, tmp_path, content, says):
    file = tmp_path / "mine.jinja"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(InvalidInput, match=f"^actor.chat_template: got '.*mine.jinja', .*{says}") as refused:
        read_template(str(file), folder, "actor.chat_template")
    assert "\n" not in str(refused.value)


def test_a_template_that_refuses_a_short_chat_is_accepted(folder, tmp_path):
    """It may want a system message; the rows of the run are rendered later."""
    (tmp_path / "strict.jinja").write_text("{{ raise_exception('a system message comes first') }}")
    assert read_template(str(tmp_path / "strict.jinja"), folder, "actor.chat_template").startswith("{{ raise")
