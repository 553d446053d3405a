"""Conversations of an evaluation are legible: who spoke, which reward, and every token."""

import torch

from prefect_rlhf.engines.compute import Context
from prefect_rlhf.engines.rows import Batch
from prefect_rlhf.tasks.reporting.conversations import (
    LONGEST_MESSAGE,
    conversation_markdown,
    conversations_markdown,
    fenced,
    newest_evaluation,
)
from prefect_rlhf.tasks.rl.evaluation.held_out import record_evaluation
from prefect_rlhf.tasks.settings import Settings
from tests.tasks.small_tokenizer import ids, save_small_tokenizer

COLUMNS = {
    "logprobs": [torch.zeros(5), torch.zeros(1)],
    "tokens": [torch.tensor(ids("a film is good </s> it bad")), torch.tensor(ids("it is bad"))],
    "prompt_length": [torch.tensor(2), torch.tensor(2)],
}
OF_PLAYS = {
    "mask": [torch.tensor([1, 1, 0, 0, 1]), torch.tensor([0])],
    "turn": [torch.tensor([0, 0, 0, 0, 1]), torch.tensor([0])],
    "turn_rewards": [torch.tensor([0.25, 1.0]), torch.tensor([0.0])],
}
SCORES = Batch({"scores": [torch.tensor(1.25), torch.tensor(float("nan"))]})


def evaluated(folder, columns):
    """Write an evaluation and return the run's folder."""
    context = Context(3, folder / "run", save_small_tokenizer(folder / "tokenizer"), row_ids=(41, 7))
    record_evaluation.function(Batch(columns, written_by=context.tokenizer), SCORES, Settings(), context)
    return folder / "run"


def test_each_turn_and_answer_is_a_message_with_its_special_tokens(tmp_path):
    text = conversations_markdown(newest_evaluation(evaluated(tmp_path, COLUMNS | OF_PLAYS)))
    whole, failed = text.split("## ")[1:]
    assert whole.startswith("Row 41 · score 1.25 · 2 turns\n")
    order = ["**Prompt**", "a film", "**Model, turn 0 · reward 0.25**", "is good", "> **Environment**", "</s>"]
    order += ["**Model, turn 1 · reward 1**", "bad"]
    places = [whole.index(part) for part in order]
    assert places == sorted(places)
    assert failed.startswith("Row 7 · no score · 1 turns") and "**Failed play**" in failed


def test_an_evaluation_without_plays_has_no_conversations(tmp_path):
    assert newest_evaluation(evaluated(tmp_path, COLUMNS)) is None
    assert newest_evaluation(tmp_path / "no run") is None


def test_a_text_cannot_leave_its_fence_or_its_quote():
    text = "before\n````\n# heading"
    assert fenced(text) == f"`````text\n{text}\n`````"
    row = {"row_id": 1, "reward": 0.0, "turns": 1, "turn_rewards": [0.0]}
    told = conversation_markdown(row | {"messages": [{"role": "environment", "content": text}]})
    assert all(line.startswith(">") for line in told.split("\n")[2:])


def test_a_cut_message_states_the_length_of_the_rest():
    assert "[5 further characters]" in fenced("x" * (LONGEST_MESSAGE + 5))
