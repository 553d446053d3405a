"""The settings in the table of docs/data.md read a row with the columns and types that the dataset's card states."""

import json
import re
from pathlib import Path

import pyarrow as pa
import pytest
import yaml

from prefect_rlhf import Chats, Preferences, Prompts, RatedAnswers, open_source
from tests.tasks.data.stored import ask, parquet, say

pytestmark = pytest.mark.quick

PAGE = Path(__file__).parents[4] / "docs" / "data.md"
KINDS = {kind.__name__: kind for kind in (Prompts, Chats, Preferences, RatedAnswers)}
CHAT, SHORT = [ask("2 + 3 ="), say("5")], {"role": "system", "content": "Be short."}
PAIR = {"chosen": [ask("2 + 3 ="), say("5")], "rejected": [ask("2 + 3 ="), say("6")]}
TOOL = {
    "name": "add",
    "description": "Add.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
VERL = {"data_source": "a", "prompt": [ask("2 + 3 =")], "ability": "math", "extra_info": {"index": 0}}


def turns(*pairs):
    return [{"from": name, "value": value} for name, value in pairs]


def verl(**reward_model):
    return {**VERL, "reward_model": {"style": "rule", **reward_model}}


ROWS = {
    "openai/gsm8k": {"question": "2 + 3 =", "answer": "It is 5.\n#### 5"},
    "HuggingFaceH4/MATH-500": {"problem": "2 + 3 =", "solution": "It is $5$.", "answer": "5", "level": 2},
    "SynthLabsAI/Big-Math-RL-Verified": {
        "problem": "2 + 3 =",
        "answer": "5",
        "domain": ["a"],
        "llama8b_solve_rate": 0.2,
    },
    "zwhe99/DeepMath-103K": {
        "question": "2 + 3 =",
        "final_answer": "5",
        "difficulty": 4.5,
        "r1_solution_1": "It is 5.",
    },
    "Salesforce/xlam-function-calling-60k": {"id": 0, "query": "2 + 3 =", "answers": "[]", "tools": json.dumps([TOOL])},
    "BytedTsinghua-SIA/DAPO-Math-17k": verl(ground_truth="5"),
    "PRIME-RL/Eurus-2-RL-Data": {**verl(ground_truth="5"), "prompt": [SHORT, ask("2 + 3 =")]},
    "Skywork/Skywork-OR1-RL-Data": verl(ground_truth='["5"]'),
    "allenai/RLVR-GSM": {"messages": [ask("2 + 3 =")], "ground_truth": "5", "dataset": "gsm8k"},
    "allenai/RLVR-IFeval": {"messages": [ask("2 + 3 =")], "ground_truth": "{}", "constraint": "a", "dataset": "ifeval"},
    "open-r1/OpenR1-Math-220k": {
        "problem": "2 + 3 =",
        "solution": "It is 5.",
        "answer": "5",
        "messages": CHAT,
        "finish_reasons": None,
        "generations": ["It is 5."],
        "correctness_math_verify": [True],
    },
    "AI-MO/NuminaMath-TIR": {"problem": "2 + 3 =", "solution": "It is 5.", "messages": CHAT},
    "allenai/tulu-3-sft-mixture": {"id": "a", "messages": CHAT, "source": "b"},
    "HuggingFaceTB/smoltalk2": {
        "messages": CHAT,
        "chat_template_kwargs": {"custom_instructions": "a", "enable_thinking": False, "python_tools": ["b"]},
        "source": "c",
    },
    "HuggingFaceH4/no_robots": {"prompt": "2 + 3 =", "prompt_id": "a", "messages": CHAT, "category": "b"},
    "teknium/OpenHermes-2.5": {
        "conversations": turns(("human", "2 + 3 ="), ("gpt", "5")),
        "system_prompt": None,
        "custom_instruction": None,
        "source": "a",
    },
    "open-thoughts/OpenThoughts-114k": {
        "system": "Be short.",
        "conversations": turns(("user", "2 + 3 ="), ("assistant", "<think>5</think> 5")),
    },
    "Salesforce/APIGen-MT-5k": {
        "conversations": turns(
            ("human", "2 + 3 ="),
            ("function_call", json.dumps({"name": "add", "arguments": {"a": 2}})),
            ("observation", "5"),
            ("gpt", "5"),
        ),
        "tools": json.dumps([TOOL]),
        "system": "Be short.",
    },
    "Team-ACE/ToolACE": {
        "system": "Be short.",
        "conversations": turns(("user", "2 + 3 ="), ("assistant", "[add(a=2)]"), ("tool", "5"), ("assistant", "5")),
    },
    "databricks/databricks-dolly-15k": {"instruction": "2 + 3 =", "context": "", "response": "5", "category": "a"},
    "nvidia/Nemotron-Post-Training-Dataset-v1": {
        "uuid": "a",
        "messages": [{**turn, "tool_calls": []} for turn in ({"role": "system", "content": ""}, *CHAT)],
    },
    "tatsu-lab/alpaca": {"instruction": "2 + 3 =", "input": "", "output": "5", "text": "Below is 2 + 3 = 5"},
    "nvidia/HelpSteer2": {"prompt": "2 + 3 =", "response": "5", "helpfulness": 4, "verbosity": 1},
    "meta-math/MetaMathQA": {"type": "a", "query": "2 + 3 =", "original_question": "3 + 2 =", "response": "5"},
    "nvidia/OpenMathInstruct-2": {"problem": "2 + 3 =", "generated_solution": "5", "expected_answer": "5"},
    "HuggingFaceH4/ultrafeedback_binarized": {"prompt": "2 + 3 =", **PAIR, "messages": CHAT, "score_chosen": 8.0},
    "allenai/llama-3.1-tulu-3-8b-preference-mixture": {"id": "a", "source": "b", "prompt": "2 + 3 =", **PAIR},
    "Skywork/Skywork-Reward-Preference-80K-v0.2": {**PAIR, "source": "a"},
    "mlabonne/orpo-dpo-mix-40k": {"source": "a", **PAIR, "prompt": "2 + 3 =", "question": "2 + 3 ="},
    "Intel/orca_dpo_pairs": {"system": "", "question": "2 + 3 =", "chosen": "5", "rejected": "6"},
    "Anthropic/hh-rlhf": {
        side: f"\n\nHuman: 2 + 3 =\n\nAssistant: {n}" for side, n in (("chosen", 5), ("rejected", 6))
    },
    "argilla/distilabel-capybara-dpo-7k-binarized": {
        "source": "a",
        "conversation": [{"input": "2 + 3 =", "output": "5"}],
        "prompt": "The whole chat, 2 + 3 =",
        **PAIR,
    },
    "jondurbin/truthy-dpo-v0.1": {"system": "Be short.", "prompt": "2 + 3 =", "chosen": "5", "rejected": "6"},
    "openbmb/UltraInteract_pair": {
        "trajectory": turns(("user", "2 + 3 =")),
        "chosen": "It is 5",
        "rejected": "It is 6",
    },
    "trl-lib/kto-mix-14k": {"prompt": CHAT[:1], "completion": CHAT[1:], "label": True},
}
"""A row of each; where a card has many more columns, some of them."""


def table():
    """The dataset, parameter and settings of each line of the page's table."""
    section = PAGE.read_text().split("### Public datasets\n")[1].split("\n\nDatasets that")[0]
    for line in section.splitlines():
        if not line.startswith("| `"):
            continue
        names, kind, settings = (cell.strip() for cell in line.split("|")[1:4])
        for name in re.findall(r"`([\w.-]+/[\w.-]+)`", names):
            yield name, kind.strip("`"), yaml.safe_load(f"{{{settings.strip('`')}}}")


@pytest.mark.parametrize(("name", "kind", "settings"), list(table()), ids=str)
def test_the_pages_settings_read_a_public_dataset(tmp_path, qwen, name, kind, settings):
    """The question is in the context alone, and the answer's words are all that is learnt."""
    row = ROWS[name]
    rows = [row, row | {"label": False}] if kind == "RatedAnswers" else [row]
    path = parquet(tmp_path / "rows.parquet", **{key: pa.array([each[key] for each in rows]) for key in row})
    source = open_source("data", KINDS[kind](path=path, split_column=None, **settings), tokenizer=qwen)
    source.check(max_tokens=4096)
    read, tokenizer = source.read([0]), source.loaded
    whole = read.get("prompt_tokens") or read["tokens"]
    text = tokenizer.decode(whole[0])
    is_transcript = name == "Anthropic/hh-rlhf"
    assert "2 + 3 =" in text
    assert text.startswith("\n\nHuman:" if is_transcript else "<|im_start|>")
    if kind == "Prompts":
        assert text.endswith("<|im_start|>assistant\n")
        return
    length = read["prompt_length"][0]
    before, after = tokenizer.decode(whole[0][:length]), tokenizer.decode(whole[0][length:])
    assert "2 + 3 =" in before
    assert "2 + 3 =" not in after
    assert "5" in after


def test_every_row_here_is_of_a_dataset_in_the_table():
    assert {name for name, _, _ in table()} == set(ROWS)
