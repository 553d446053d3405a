"""Prompts that show tools: as `apply_chat_template` renders them, and refused if the template ignores them."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.utils import get_json_schema

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.tasks.data.datasets import PromptDataset
from prefect_rlhf.tasks.data.tools import ShownTools, check_answers, shown_by
from prefect_rlhf.tasks.play import Play
from tests.engines.functions.of_tools import add
from tests.tasks.data.stored import parquet

TOOLS = Path(__file__).parents[2] / "engines" / "functions" / "of_tools.py"
LISTED = "{% if tools %}{% for t in tools %}tool {{ t | tojson }}\n{% endfor %}{% endif %}"
TURNS = "{% for m in messages %}{{ m.role }}: {{ m.content }}CALLS\n{% endfor %}"
OPENED = "{% if add_generation_prompt %}assistant: {% endif %}"
CALLS = "{% for c in m.tool_calls or [] %}CALL{% endfor %}"
HERMES = '<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>'
LLAMA_3 = '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}'


def template(call: str, listed: str = LISTED) -> str:
    return listed + TURNS.replace("CALLS", CALLS.replace("CALL", call)) + OPENED


@pytest.fixture
def prompts(tmp_path):
    """Make prompts of a tokenizer of bytes, with a chat template."""

    def make(chat_template, tools, is_chat=True):
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        of_bytes = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
        of_bytes.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        of_bytes.decoder = decoders.ByteLevel()
        fast = PreTrainedTokenizerFast(tokenizer_object=of_bytes)
        fast.chat_template = chat_template
        fast.save_pretrained(tmp_path / "model")
        path = parquet(tmp_path / "prompts.parquet", prompt=["2 + 3"])
        folder = str(tmp_path / "model")
        return PromptDataset("prompts", path, folder, split_column=None, chat_template=is_chat, tools=tools), fast

    return make


def shown(written_as="hermes"):
    return ShownTools(json.dumps([get_json_schema(add)]), written_as)


def test_prompts_show_the_schemas_of_the_plays_tools(prompts):
    play = Play(function=f"{TOOLS}:right", signature="tools", tools=[f"{TOOLS}:add"], max_tokens=8)
    tools = shown_by([play, play.model_copy(update={"max_tokens": 9})])
    source, tokenizer = prompts(template(HERMES), tools)
    chat = [{"role": "user", "content": "2 + 3"}]
    text = tokenizer.apply_chat_template(chat, tools=[get_json_schema(add)], add_generation_prompt=True, tokenize=False)
    assert '"name": "add"' in text
    expected = tokenizer(text)["input_ids"]
    assert source.read([0])["prompt_tokens"] == [expected]
    assert source.check(max_tokens=4096).longest == len(expected)
    assert "add" in source.remarks()[0]
    assert shown_by([]) is None


def test_a_flows_plays_must_have_the_same_tools():
    one = Play(function=f"{TOOLS}:right", signature="tools", tools=[f"{TOOLS}:add"], max_tokens=8)
    other = one.model_copy(update={"tool_format": "llama3"})
    with pytest.raises(InvalidInput, match="play.tools: got '2 plays', expected the same tools in all plays, because"):
        shown_by([one, other])


@pytest.mark.parametrize(
    ("chat_template", "tools", "is_chat", "says"),
    [
        (
            template(HERMES, listed=""),
            shown(),
            True,
            "play.tools: got 'add', expected a chat template that shows tools",
        ),
        (
            template(HERMES),
            shown("llama3"),
            True,
            "play.tool_format: got 'llama3', expected hermes, the format of the ",
        ),
        (template(LLAMA_3), shown(), True, "play.tool_format: got 'hermes', expected llama3, the format of the chat"),
        (
            template(HERMES),
            shown(),
            False,
            "prompts.chat_template: got False, expected true, or prompts that are chats",
        ),
    ],
)
def test_prompts_that_do_not_show_tools_are_refused_in_one_line(prompts, chat_template, tools, is_chat, says):
    source, _ = prompts(chat_template, tools, is_chat)
    with pytest.raises(InvalidInput, match=says):
        source.check(max_tokens=4096)


@pytest.mark.parametrize(("call", "written_as"), [(HERMES, "hermes"), (LLAMA_3, "llama3"), ("[a_tool(1)]", "llama3")])
def test_a_template_is_accepted_that_writes_calls_in_that_format_or_in_an_unknown_one(prompts, call, written_as):
    source, _ = prompts(template(call), shown(written_as))
    assert source.check(max_tokens=4096).longest > len("2 + 3")


def test_messages_need_a_chat_template(prompts):
    source, _ = prompts(None, None, is_chat=False)
    says = "play.signature: got 'gymnasium', expected play: its answers are messages, and the tokenizer of .* has no"
    with pytest.raises(InvalidInput, match=says):
        check_answers([Play(function="my_envs:Guess-v0", signature="gymnasium", max_tokens=8)], source.tokenizer)
    check_answers([Play(function="my_play.py:solve", max_tokens=8)], source.tokenizer)


def test_messages_go_through_a_chat_template(prompts):
    source, _ = prompts(template(HERMES), None)
    check_answers([Play(function="my_envs:Guess-v0", signature="gymnasium", max_tokens=8)], source.tokenizer)
