"""Talking with a trained model at the terminal."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from prefect_rlhf.flows.commands.cli import main
from tests.support.tiny import make_model

TOKENS = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("chat") / "actor", layers=3)


@pytest.fixture(autouse=True)
def terminal(monkeypatch):
    """What a person types, line by line."""
    lines = []
    monkeypatch.setattr("builtins.input", lambda _: lines.pop(0) if lines else end())
    return lines


def end():
    raise EOFError


def answered(folder, asked):
    """What transformers itself answers, greedily, to a chat or to a text."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    text = (
        asked
        if isinstance(asked, str)
        else tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
    )
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=isinstance(asked, str))["input_ids"]
    made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False)
    return tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)


def said(message):
    return {"role": "user", "content": message}


def test_a_message_gets_the_answer_that_transformers_gives_under_the_chat_template(folder, capsys):
    assert main(["chat", folder, "what is it", "--max-tokens", str(TOKENS)]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.split() == answered(folder, [said("what is it")]).split() != []


def test_a_persons_lines_form_a_chat(folder, terminal, capsys):
    """The second answer follows both messages and the first answer; an empty line is no message."""
    terminal += ["is it good", " ", "what is it"]
    assert main(["chat", folder, "--max-tokens", str(TOKENS)]) == 0
    first, second = [line for line in capsys.readouterr().out.splitlines()[1:] if line]
    before = answered(folder, [said("is it good")])
    chat = [said("is it good"), {"role": "assistant", "content": before}, said("what is it")]
    assert first.split() == before.split()
    assert second.split() == answered(folder, chat).split() != answered(folder, [said("what is it")]).split()


def test_plain_text_is_continued_as_it_is(folder, capsys):
    assert main(["chat", folder, "the film is", "--plain", "--max-tokens", str(TOKENS)]) == 0
    assert capsys.readouterr().out.split() == answered(folder, "the film is").split()


def test_a_conversation_longer_than_the_context_ends_in_a_line(folder, capsys):
    assert main(["chat", folder, "good " * 80]) == 2
    assert capsys.readouterr().err == (
        "prefect-rlhf: MESSAGE: got '82 tokens with all before it', expected fewer than 64, the model's context\n"
    )


def run_folder(folder):
    (folder / "result.json").write_text(json.dumps({"models": {"actor": "a", "critic": "b"}}))


def damaged(folder):
    make_model(folder)
    (folder / "model.safetensors").write_bytes(b"short")


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda folder: None, "a Hugging Face folder, with config.json, such as runs/latest/actor"),
        (run_folder, "the folder of a model in this run: {0}/actor, {0}/critic"),
        (lambda folder: make_model(folder, scalar=True), "a model that generates; this one gives a text a score"),
        (damaged, "a model that loads ("),
        (lambda folder: folder.rmdir(), "a folder that exists; a run that trains an actor leaves RUN/actor"),
    ],
)
def test_chat_refuses_a_folder_without_a_generating_model_in_one_line(made, says, tmp_path, capsys):
    made(tmp_path)
    assert main(["chat", str(tmp_path), "what is it"]) == 2
    (line,) = capsys.readouterr().err.splitlines()[-1:]
    assert line.startswith(f"prefect-rlhf: MODEL: got '{tmp_path}', expected {says.format(tmp_path)}"), line
