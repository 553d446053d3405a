"""Answers beside transformers' own rendering of the whole chat, with the chat templates of families."""

import json
from itertools import compress
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from prefect_rlhf.engines.sampling.chats.answer_end import answer_end
from prefect_rlhf.tasks.data.answer_pieces import chat_pieces
from prefect_rlhf.tasks.data.chats import ChatDataset
from prefect_rlhf.tasks.data.datasets import PreferenceDataset
from tests.engines.sampling.stand_ins import FAMILIES, OF_SENTENCEPIECE, of_sentencepiece, stand_in, template
from tests.tasks.data.stored import ask, json_lines, say

pytestmark = pytest.mark.quick

PROMPTS = [ask("what is it")], [ask("what is it"), say("a film"), ask("is it good")]
ANSWERS = "the film is good", " <think>\nit is\n</think>\n\nthe code is 4711 "


def rendered(folder, chat, **variables):
    return AutoTokenizer.from_pretrained(folder).apply_chat_template(chat, return_dict=True, **variables)["input_ids"]


def sides(row):
    """A row's prompt and answer as the settings of each dataset, with the text of the answer if it has one."""
    return {
        "messages": {"prompt": row[:-1], "chosen": row[-1:], "rejected": [say("no")]},
        "both whole": {"chosen": row, "rejected": [*row[:-1], say("no")]},
        "text": {"prompt": row[:-1], "chosen": row[-1]["content"], "rejected": "no"},
        "completion": {"prompt": row[:-1], "completion": row[-1:]},
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_pairs_and_completions_have_the_tokens_of_the_whole_chat_up_to_the_answers_end(tmp_path, family):
    """As in TRL 1.16, where also the line break after the end is learnt. Qwen 3's template writes empty thoughts before
    an answer without thoughts, and leaves out those of earlier answers; others remove spaces."""
    folder = stand_in(family, tmp_path)
    end = answer_end(AutoTokenizer.from_pretrained(folder)).token
    for asked in PROMPTS:
        for text in ANSWERS:
            whole, before = rendered(folder, [*asked, say(text)]), rendered(folder, asked, add_generation_prompt=True)
            assert whole[: len(before)] == before
            expected = whole[: len(whole) - whole[::-1].index(end)]
            for form, row in sides([*asked, say(text)]).items():
                path = json_lines(tmp_path / f"{form}.jsonl", row)
                dataset = ChatDataset if form == "completion" else PreferenceDataset
                source = dataset("rows", path, folder, split_column=None)
                source.check(max_tokens=1000)
                read = source.read([0])
                assert (read["tokens"], read["prompt_length"]) == ([expected], [len(before)]), json.dumps(row)


@pytest.mark.parametrize("name", OF_SENTENCEPIECE)
def test_a_sentencepiece_tokenizer_puts_no_space_before_an_answer_that_follows(tmp_path, name):
    folder = of_sentencepiece(tmp_path, name)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = [ask("Hi"), say("Hello there"), ask("What is it?"), say("A film.")]
    whole = rendered(folder, chat)
    source = ChatDataset("rows", json_lines(tmp_path / "m.jsonl", {"messages": chat}), folder, split_column=None)
    source.check(max_tokens=1000)
    read = source.read([0])
    assert read["tokens"] == [whole[: len(whole) - whole[::-1].index(tokenizer.eos_token_id)]]
    learned = list(compress(read["tokens"][0][read["prompt_length"][0] :], read["mask"][0]))
    answers = "Hello there</s>A film.</s>" if name == "zephyr" else " Hello there</s> A film.</s>"
    assert "".join(tokenizer.convert_ids_to_tokens(learned)).replace("\u2581", " ") == answers
    for prompt, answer in (("The sky is", " blue."), ("1 + 2 =", "3"), ("Line\n", "next"), ("It is ", "good")):
        row = {"prompt": prompt, "completion": answer}
        texts = ChatDataset("rows", json_lines(tmp_path / "t.jsonl", row), folder, split_column=None)
        (tokens,) = texts.read([0])["tokens"]
        assert tokenizer.decode(tokens[:-1], skip_special_tokens=True) == prompt + answer


TURN = "{% if m.role == 'assistant' %}ANSWER{% else %}{{ m.content }}{% endif %}"
TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n" + TURN + "<|im_end|>\n{% endfor %}"
PROMPTING = "{% if add_generation_prompt %}<|im_start|>assistant\nOPENED{% endif %}"
NO_THOUGHTS = "<think>\n\n</think>\n\n"
UNLESS_IT_THINKS = "{% if '<think>' not in m.content %}WRITTEN{% endif %}{{ m.content }}"
OF_THOUGHTS = {
    "DeepSeek R1": ("{{ m.content.split('</think>')[-1] }}", "<think>\n"),
    "Nemotron 3": (UNLESS_IT_THINKS.replace("WRITTEN", "<think></think>"), "<think>\n"),
    "Qwen 3.5": (UNLESS_IT_THINKS.replace("WRITTEN", NO_THOUGHTS), NO_THOUGHTS),
}
"""What a template writes as an answer, and after the heading of an answer to be sampled."""
REMARK = "rows: the template prompts with '<think>\\n'; answers are learned as the template writes them, without it"


@pytest.mark.parametrize("family", OF_THOUGHTS)
def test_an_answer_is_learnt_as_it_is_written_if_its_prompt_begins_other_thoughts(tmp_path, family):
    """TRL 1.16 learns from the token on at which answer and prompt diverge, which may be the one after `<think>`."""
    folder = stand_in("qwen3", tmp_path)
    answer, opened = OF_THOUGHTS[family]
    written = TURNS.replace("ANSWER", answer) + PROMPTING.replace("OPENED", opened)
    (Path(folder) / "chat_template.jinja").write_text(written)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template == written
    for text in ("a film", "<think>\nit is\n</think>\n\na film"):
        whole = tokenizer.apply_chat_template([ask("what"), say(text)], tokenize=False)
        path = json_lines(tmp_path / "rows.jsonl", {"prompt": [ask("what")], "completion": [say(text)]})
        source = ChatDataset("rows", path, folder, split_column=None)
        source.check(max_tokens=1000)
        read = source.read([0])
        assert tokenizer.decode(read["tokens"][0]) == whole.removesuffix("\n")
        learned = tokenizer.decode(read["tokens"][0][read["prompt_length"][0] :])
        assert learned == whole.partition("<|im_start|>assistant\n")[2].removesuffix("\n").removeprefix(opened)
        said = [line for line in source.remarks() if "prompts with" in line]
        assert said == ([] if family == "Qwen 3.5" else [REMARK])


@pytest.mark.parametrize("family", ["deepseek_r1_distill", "nemotron_3_nano", "qwen3_5_nothink", "qwen2_5", "gemma3"])
@pytest.mark.parametrize("text", ["a film", "<think>\nit is\n</think>\n\na film"])
def test_the_pieces_of_a_chat_are_its_whole_rendering_by_the_models_own_template(tmp_path, family, text):
    """An answer begins behind its prompt, or before thoughts that only the prompt has."""
    tokenizer = AutoTokenizer.from_pretrained(stand_in("qwen3", tmp_path))
    tokenizer.chat_template = template(family)
    whole = tokenizer.apply_chat_template([ask("what"), say(text)], tokenize=False)
    prompt = tokenizer.apply_chat_template([ask("what")], tokenize=False, add_generation_prompt=True)
    heading = prompt if whole.startswith(prompt) else prompt[: prompt.rindex("<think>")]
    pieces = chat_pieces(tokenizer, [ask("what"), say(text)], "row")
    texts = [piece.text.replace(piece.mark, "") for piece in pieces]
    assert "".join(texts) == whole
    assert [text for text, piece in zip(texts, pieces, strict=True) if piece.is_answer] == [whole.removeprefix(heading)]
