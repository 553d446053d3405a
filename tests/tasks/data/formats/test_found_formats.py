"""Rows as other libraries write them become the tokens that `apply_chat_template` makes of their messages.

The shapes are those of LLaMA-Factory's data/README.md, axolotl's docs/dataset-formats, TRL's dataset_formats.md and the
cards of public datasets, as each case says. Texts are invented.
"""

import json

import pytest
from transformers import AutoTokenizer

from prefect_rlhf.blocks.chats import Chats
from prefect_rlhf.blocks.dataset import Preferences, Prompts
from prefect_rlhf.blocks.rated_answers import RatedAnswers
from prefect_rlhf.flows.training.inputs import open_source
from tests.tasks.data.stored import ask, say

pytestmark = pytest.mark.quick

KINDS = {"chats": Chats, "prompts": Prompts, "pairs": Preferences, "answers": RatedAnswers}


def human(text):
    return {"from": "human", "value": text}


def gpt(text):
    return {"from": "gpt", "value": text}


def system(text):
    return {"role": "system", "content": text}


FUNCTION = {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}}
SCHEMA = {"type": "function", "function": FUNCTION}
CALL = {"name": "add", "arguments": {"a": 1, "b": 2}}
CALLED = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}]}
GLAIVE = {  # llamafactory/glaive_toolcall_en
    "conversations": [
        human("1 + 2?"),
        {"from": "function_call", "value": json.dumps(CALL)},
        {"from": "observation", "value": '{"sum": 3}'},
        gpt("It is 3."),
    ],
    "tools": json.dumps([FUNCTION]),
}
TOOL_CHAT = [ask("1 + 2?"), CALLED, {"role": "tool", "content": '{"sum": 3}'}, say("It is 3.")]
TWO = [CALL, {"name": "add", "arguments": {"a": 5}}]
PARALLEL = {  # several calls in a turn, as a list
    "conversations": [
        human("Twice."),
        {"from": "function_call", "value": json.dumps(TWO)},
        {"from": "observation", "value": "3"},
        {"from": "observation", "value": "5"},
        gpt("3 and 5."),
    ],
    "tools": json.dumps([SCHEMA]),
}
PARALLEL_CHAT = [
    ask("Twice."),
    {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call} for call in TWO]},
    {"role": "tool", "content": "3"},
    {"role": "tool", "content": "5"},
    say("3 and 5."),
]
HERMES = [  # NousResearch/hermes-function-calling-v1: the calls are text
    {"from": "system", "value": "You call functions."},
    human("1 + 2?"),
    gpt("<tool_call>\n{}\n</tool_call>"),
    {"from": "tool", "value": "<tool_response>3</tool_response>"},
    gpt("3."),
]
HERMES_CHAT = [
    system("You call functions."),
    ask("1 + 2?"),
    say("<tool_call>\n{}\n</tool_call>"),
    {"role": "tool", "content": "<tool_response>3</tool_response>"},
    say("3."),
]
TURNS, CHAT = [human("Hi"), gpt("Hello"), human("Bye"), gpt("See you")], [ask("Hi"), say("Hello"), ask("Bye")]
CHAT_END = say("See you")
ALPACA = {"instruction": "Add the numbers.", "input": "1, 2", "output": "3"}
ALPACA_ASKED = ask("Add the numbers.\n1, 2")

# name: the kind, the row, its messages, the schemas that the template shows, and what the log says of the format
LEARNT = {
    "ShareGPT": ({"conversations": TURNS}, [*CHAT, CHAT_END], None, "ShareGPT (conversations): 4 turns in row 0"),
    "ShareGPT with columns of LLaMA-Factory": (
        {"conversations": TURNS, "system": "Be short.", "tools": "[]"},
        [system("Be short."), *CHAT, CHAT_END],
        None,
        "ShareGPT (conversations, system, tools): 4 turns in row 0",
    ),
    "a system turn takes the place of the column": (
        {"conversations": [{"from": "system", "value": "Be kind."}, *TURNS], "system": "Be short."},
        [system("Be kind."), *CHAT, CHAT_END],
        None,
        "ShareGPT (conversations, system): 5 turns in row 0",
    ),
    "an empty system turn is none": (
        {"conversations": [{"from": "system", "value": ""}, *TURNS]},
        [*CHAT, CHAT_END],
        None,
        "ShareGPT (conversations): 5 turns in row 0",
    ),
    "ShareGPT that ends with the user": (
        {"conversations": [*TURNS[:2], human("Bye")]},
        CHAT[:2],
        None,
        "ShareGPT (conversations): 3 turns in row 0",
    ),
    "ShareGPT as TRL's documentation has it": (
        {"conversations": [{"from": "user", "value": "Hi"}, {"from": "assistant", "value": "Hello"}]},
        CHAT[:2],
        None,
        "ShareGPT (conversations): 2 turns in row 0",
    ),
    "messages under conversations, of axolotl and Unsloth": (
        {"conversations": [*CHAT, CHAT_END]},
        [*CHAT, CHAT_END],
        None,
        "ShareGPT (conversations): 4 turns in row 0",
    ),
    "pygmalion": (
        {"conversations": [{"role": "user", "value": "Hi"}, {"role": "assistant", "value": "Hello"}]},
        CHAT[:2],
        None,
        "ShareGPT (conversations): 2 turns in row 0",
    ),
    "lmsys-chat-1m": (
        {"conversation_id": "a", "conversation": [*CHAT, CHAT_END], "turn": 2},
        [*CHAT, CHAT_END],
        None,
        "ShareGPT (conversation): 4 turns in row 0",
    ),
    "glaive_toolcall": (GLAIVE, TOOL_CHAT, [SCHEMA], "ShareGPT (conversations, tools): 4 turns in row 0"),
    "several calls": (PARALLEL, PARALLEL_CHAT, [SCHEMA], "ShareGPT (conversations, tools): 5 turns in row 0"),
    "hermes-function-calling": (
        {"id": "1", "conversations": HERMES, "category": "a"},
        HERMES_CHAT,
        None,
        "ShareGPT (conversations): 5 turns in row 0",
    ),
    "Alpaca": (ALPACA, [ALPACA_ASKED, say("3")], None, "Alpaca (instruction, output, input)"),
    "Alpaca without input": (
        {**ALPACA, "input": ""},
        [ask("Add the numbers."), say("3")],
        None,
        "Alpaca (instruction, output, input)",
    ),
    "Alpaca of LLaMA-Factory": (
        {**ALPACA, "system": "Be short.", "history": [["Hi", "Hello"], ["Bye", "See you"]]},
        [system("Be short."), *CHAT, CHAT_END, ALPACA_ASKED, say("3")],
        None,
        "Alpaca (instruction, output, input, history, system)",
    ),
    "databricks-dolly-15k": (
        {"instruction": "Who?", "context": "Ann wrote it.", "response": "Ann.", "category": "closed_qa"},
        [ask("Who?\nAnn wrote it."), say("Ann.")],
        None,
        "Alpaca (instruction, response, context)",
    ),
    "Open-Orca/SlimOrca, with weights": (
        {"conversations": [{**human("Hi"), "weight": 0.0}, {**gpt("Hello"), "weight": 1.0}]},
        CHAT[:2],
        None,
        "ShareGPT (conversations): 2 turns in row 0",
    ),
    "OpenOrca": (
        {"id": "1", "system_prompt": "Be short.", "question": "1 + 2?", "response": "3"},
        [system("Be short."), ask("1 + 2?"), say("3")],
        None,
        "question and answer (question, response, system_prompt)",
    ),
    "Llama-Nemotron-Post-Training-Dataset": (
        {"input": CHAT[:1], "output": "Hello", "system_prompt": "Think."},
        [system("Think."), *CHAT[:2]],
        None,
        "question and answer (input, output, system_prompt): 1 turns in row 0",
    ),
    "a system message takes the place of a question's column": (
        {"input": [system("Be kind."), *CHAT[:1]], "output": "Hello", "system_prompt": "Think."},
        [system("Be kind."), *CHAT[:2]],
        None,
        "question and answer (input, output, system_prompt): 2 turns in row 0",
    ),
    "When2Call": (
        {"tools": [json.dumps(FUNCTION)], "messages": CHAT[:2]},
        CHAT[:2],
        [SCHEMA],
        "messages (messages)",
    ),
    "OpenAI": ({"messages": [*CHAT, CHAT_END]}, [*CHAT, CHAT_END], None, "messages (messages)"),
    "turns under messages": ({"messages": TURNS}, [*CHAT, CHAT_END], None, "messages (messages)"),
    "ultrachat_200k": (
        {"prompt": "Hi", "prompt_id": "a", "messages": [*CHAT, CHAT_END]},
        [*CHAT, CHAT_END],
        None,
        "messages (messages)",
    ),
}


@pytest.mark.parametrize("case", LEARNT)
def test_chats_are_learnt_as_the_template_renders_them(stored, qwen, case):
    row, messages, tools, described = LEARNT[case]
    path = stored(row)
    source = open_source("chats", Chats(path=path, split_column=None), qwen)
    source.check(max_tokens=4096)
    tokenizer = AutoTokenizer.from_pretrained(qwen)
    whole = tokenizer.apply_chat_template(messages, tools=tools, return_dict=False)
    (tokens,), (length,), (mask,) = (source.read([0])[key] for key in ("tokens", "prompt_length", "mask"))
    assert tokens == whole[: len(tokens)]
    assert tokenizer.decode(whole[len(tokens) :]) == "\n"
    answers = [number for number, turn in enumerate(messages) if turn["role"] == "assistant"]
    trained = [token for token, counts in zip(tokens[length:], mask, strict=True) if counts]
    assert trained == [token for number in answers for token in written(tokenizer, messages, tools, number)]
    assert source.rows.remark == f"chats: {path} is read as {described}"
    assert source.warnings() == ()


def written(tokenizer, messages, tools, number):
    """The tokens that the template adds for an answer, up to the end of its turn."""
    shown = {"tools": tools, "return_dict": False}
    before = tokenizer.apply_chat_template(messages[:number], add_generation_prompt=True, **shown)
    after = tokenizer.apply_chat_template(messages[: number + 1], **shown)
    return after[len(before) : -1]


ASKED = {
    "ShareGPT": ({"conversations": TURNS[:3]}, CHAT, None, "ShareGPT (conversations): 3 turns in row 0"),
    "ShareGPT with tools": (
        {"conversations": [human("1 + 2?")], "tools": json.dumps([FUNCTION]), "system": "Be short."},
        [system("Be short."), ask("1 + 2?")],
        [SCHEMA],
        "ShareGPT (conversations, system, tools): 1 turns in row 0",
    ),
    "OpenAI": ({"messages": CHAT}, CHAT, None, "messages (messages): 3 turns in row 0"),
    "Alpaca": (ALPACA, [ALPACA_ASKED], None, "Alpaca (instruction, input)"),
    "OpenRLHF's prompts": (
        {"dataset": "a", "context_messages": CHAT},
        CHAT,
        None,
        "question and answer (context_messages): 3 turns in row 0",
    ),
    "OpenOrca": (
        {"system_prompt": "Be short.", "question": "1 + 2?", "response": "3"},
        [system("Be short."), ask("1 + 2?")],
        None,
        "question and answer (question, system_prompt)",
    ),
    "verl": (
        {
            "data_source": "openai/gsm8k",
            "prompt": [ask("1 + 2?")],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "3"},
            "extra_info": {"question": "1 + 2?", "split": "train"},
        },
        [ask("1 + 2?")],
        None,
        "prompts (prompt)",
    ),
}


@pytest.mark.parametrize("case", ASKED)
def test_prompts_are_their_messages_as_the_template_renders_them(stored, qwen, case):
    row, messages, tools, described = ASKED[case]
    path = stored(row)
    source = open_source("prompts", Prompts(path=path, split_column=None), qwen)
    source.check(max_tokens=4096)
    tokenizer = AutoTokenizer.from_pretrained(qwen)
    whole = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, return_dict=False)
    assert source.read([0])["prompt_tokens"] == [whole]
    assert source.rows.remark == f"prompts: {path} is read as {described}"
    assert source.read_column("prompt", [0]) == [messages]


@pytest.mark.parametrize(
    ("row", "described"),
    [
        ({"question": "1 + 2?", "answer": "1 + 2 = 3\n#### 3"}, "question and answer (question)"),  # openai/gsm8k
        ({"problem": "1 + 2?", "solution": "It is 3.", "answer": "3"}, "question and answer (problem)"),  # NuminaMath
        ({"query": "1 + 2?", "response": "3"}, "question and answer (query)"),  # MetaMathQA
        ({"input": "1 + 2?", "label": "3"}, "question and answer (input)"),  # OpenRLHF's input_key
    ],
)
def test_plain_questions_are_prompts_and_every_column_reaches_a_reward(stored, qwen, row, described):
    path = stored(row)
    tokenizer = AutoTokenizer.from_pretrained(qwen)
    source = open_source("prompts", Prompts(path=path, split_column=None), qwen)
    source.check(max_tokens=4096)
    assert source.read([0])["prompt_tokens"] == [tokenizer("1 + 2?")["input_ids"]]
    assert source.rows.remark == f"prompts: {path} is read as {described}"
    assert {name: source.read_column(name, [0])[0] for name in source.columns} == {"prompt": "1 + 2?", **row}
    assert source.column_kinds["prompt"] == "text"


@pytest.mark.parametrize(
    "row",
    [
        {"question": "1 + 2?", "answer": "3"},
        {"prompt": "1 + 2?", "response": "3"},
        {"input": "1 + 2?", "output": "3"},
        {"prompt": "1 + 2?", "completion": "3"},
        {"prompt": "1 + 2?", "response": "3", "chosen": "3", "rejected": "4"},  # Dahoas/full-hh-rlhf
    ],
)
@pytest.mark.parametrize("chat_template", [False, True])
def test_questions_and_answers_are_plain_text_unless_a_template_is_requested(stored, qwen, row, chat_template):
    source = open_source("chats", Chats(path=stored(row), split_column=None, chat_template=chat_template), qwen)
    source.check(max_tokens=4096)
    tokenizer = AutoTokenizer.from_pretrained(qwen)
    (tokens,) = source.read([0])["tokens"]
    chat = tokenizer.apply_chat_template([ask("1 + 2?"), say("3")], tokenize=False)
    assert tokenizer.decode(tokens) == (chat.rstrip("\n") if chat_template else f"1 + 2?3{tokenizer.eos_token}")


def test_a_converted_rows_columns_reach_a_reward_unchanged(stored, qwen):
    row = {"conversations": TURNS[:1], "tools": json.dumps([FUNCTION]), "answer": "3"}
    source = open_source("prompts", Prompts(path=stored(row), split_column=None), qwen)
    assert {name: source.read_column(name, [0])[0] for name in source.columns} == {"prompt": CHAT[:1], **row}
    assert source.column_kinds == {"prompt": "other", "conversations": "other", "tools": "text", "answer": "text"}


PAIR_ENDS = [say("See you"), say("No")]
PAIRS = {
    "LLaMA-Factory's dpo_en_demo": (
        {"conversations": TURNS[:3], "chosen": gpt("See you"), "rejected": gpt("No")},
        CHAT,
        "ShareGPT (conversations, chosen, rejected): 3 turns in row 0",
    ),
    "the same, with a system turn": (
        {
            "conversations": [{"from": "system", "value": "Be kind."}, *TURNS[:3]],
            "chosen": gpt("See you"),
            "rejected": gpt("No"),
        },
        [system("Be kind."), *CHAT],
        "ShareGPT (conversations, chosen, rejected): 4 turns in row 0",
    ),
    "answers as text": (
        {"conversations": TURNS[:3], "chosen": "See you", "rejected": "No"},
        CHAT,
        "ShareGPT (conversations, chosen, rejected): 3 turns in row 0",
    ),
    "Alpaca of LLaMA-Factory": (
        {"instruction": "Add the numbers.", "input": "1, 2", "chosen": "See you", "rejected": "No"},
        [ALPACA_ASKED],
        "Alpaca (instruction, chosen, rejected, input)",
    ),
    "Intel/orca_dpo_pairs": (
        {"system": "Be kind.", "question": "Bye", "chosen": "See you", "rejected": "No"},
        [system("Be kind."), ask("Bye")],
        "question and answer (question, chosen, rejected, system)",
    ),
    "HuggingFaceH4/ultrafeedback_binarized": (
        {
            "prompt": "Bye",
            "prompt_id": "a",
            "chosen": [ask("Bye"), say("See you")],
            "rejected": [ask("Bye"), say("No")],
            "messages": [ask("Bye"), say("See you")],
            "score_chosen": 8.0,
            "score_rejected": 2.0,
        },
        [ask("Bye")],
        "pairs (prompt, chosen, rejected)",
    ),
    "TRL, implicit prompt": (
        {"chosen": [*CHAT, say("See you")], "rejected": [*CHAT, say("No")]},
        CHAT,
        "pairs (chosen, rejected); the prompt is what both answers begin with",
    ),
    "the same in turns": (
        {"chosen": TURNS, "rejected": [*TURNS[:3], gpt("No")]},
        CHAT,
        "pairs (chosen, rejected); the prompt is what both answers begin with",
    ),
    "TRL, explicit prompt": (
        {"prompt": CHAT, "chosen": [say("See you")], "rejected": [say("No")]},
        CHAT,
        "pairs (prompt, chosen, rejected)",
    ),
    "explicit turns": (
        {"prompt": TURNS[:3], "chosen": [gpt("See you")], "rejected": [gpt("No")]},
        CHAT,
        "pairs (prompt, chosen, rejected)",
    ),
    "a prompt whose question both sides repeat": (
        {
            "prompt": [system("Be kind."), ask("Bye")],
            "chosen": [ask("Bye"), say("See you")],
            "rejected": [ask("Bye"), say("No")],
        },
        [system("Be kind."), ask("Bye")],
        "pairs (prompt, chosen, rejected)",
    ),
}


@pytest.mark.parametrize("case", PAIRS)
def test_both_answers_follow_the_messages_of_the_prompt(stored, qwen, case):
    row, prompt, described = PAIRS[case]
    path = stored(row)
    source = open_source("pairs", Preferences(path=path, split_column=None), qwen)
    source.check(max_tokens=4096)
    tokenizer = AutoTokenizer.from_pretrained(qwen)
    read = source.read([0, 1])
    before = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
    for tokens, length, end in zip(read["tokens"], read["prompt_length"], PAIR_ENDS, strict=True):
        whole = tokenizer.apply_chat_template([*prompt, end], return_dict=False)
        assert (tokens[:length], tokens) == (before, whole[:-1])  # but for the line break after the turn
    assert source.rows.remark == f"pairs: {path} is read as {described}"


RATED = {
    "TRL": ({"prompt": CHAT, "completion": [CHAT_END]}, CHAT, "completions (prompt, completion, label)"),
    "LLaMA-Factory's kto_en_demo": (
        {"messages": [*CHAT, CHAT_END]},
        CHAT,
        "messages (messages, label): 4 turns in row 0",
    ),
    "ShareGPT": ({"conversations": TURNS}, CHAT, "ShareGPT (conversations, label): 4 turns in row 0"),
    "Alpaca": (
        {"instruction": "Bye", "input": "", "output": "See you"},
        [ask("Bye")],
        "Alpaca (instruction, output, label, input)",
    ),
}


@pytest.mark.parametrize(
    ("case", "name"), [*((case, "label") for case in RATED), *((case, "kto_tag") for case in RATED if case != "TRL")]
)
def test_rated_answers_have_their_label_and_learn_only_the_answer(stored, qwen, case, name):
    row, prompt, described = RATED[case]
    path = stored({**row, name: True}, {**row, name: False})
    source = open_source("answers", RatedAnswers(path=path, split_column=None), qwen)
    source.check(max_tokens=4096)
    tokenizer = AutoTokenizer.from_pretrained(qwen)
    read = source.read([1, 0])
    assert read["label"] == [0.0, 1.0]
    before = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
    whole = tokenizer.apply_chat_template([*prompt, CHAT_END], return_dict=False)
    assert (read["tokens"][0], read["prompt_length"][0]) == (whole[:-1], len(before))
    assert all(read["mask"][0])
    assert source.rows.remark == f"answers: {path} is read as {described.replace('label', name)}"
