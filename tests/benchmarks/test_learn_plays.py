"""Tasks of `benchmarks.learn` that are plays: disjoint, shown in the prompt, and solved by nothing that is simpler."""

import asyncio
import re
from statistics import mean

import pyarrow.parquet as pq
import pytest

from benchmarks.learn import calculator, guess
from benchmarks.learn import plays as learn_plays
from prefect_rlhf.engines.functions.plays.say import Said

pytestmark = pytest.mark.quick

TASKS = ("calculator", "guess")
PLAYS = {"calculator": calculator.solve, "guess": guess.opens}


class Scripted:
    """A model whose turns are a function of the prompt and the answers so far; `turns` are the turns that it has."""

    def __init__(self, speak, prompt, turns):
        self.speak, self.prompt, self.turns = speak, prompt, turns
        self.answers, self.rewards = [], []

    async def __call__(self, answer=None):
        if answer is not None:
            self.answers.append(answer)
        number = len(self.answers)
        if number >= self.turns:
            return Said("", (), "budget", self.turns - 1)
        return Said(self.speak(self.prompt, self.answers), (1,), "stop", number)

    def reward(self, value):
        self.rewards.append(value)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    return {name: pq.read_table(learn_plays.prepare(folder, name)).to_pylist() for name in TASKS}


def split(tasks, name, value):
    return [row for row in tasks[name] if row["split"] == value]


def outcomes(tasks, name, speak, turns=None):
    """The mean score, with the rewards of turns, and the share solved, over all held-out tasks."""
    scores, solved = [], []
    for row in split(tasks, name, "held_out"):
        say = Scripted(speak, row["prompt"], turns or learn_plays.PLAYS[name]["max_turns"])
        made = asyncio.run(PLAYS[name](row, say))
        scores.append(made["score"] + sum(say.rewards))
        solved.append(made["solved"])
    return mean(scores), mean(solved)


def perfect_calculator(prompt, answers):
    """Know the operation of each way to ask; copy the numbers, and then the result."""
    if answers:
        return f" The answer is {re.search(r'-?[0-9]+', answers[0])[0]}."
    asked = prompt[-1]["content"]
    for sign, way in calculator.WAYS:
        pattern = re.escape(way).replace(r"\{a\}", r"(?P<a>\d+)").replace(r"\{b\}", r"(?P<b>\d+)")
        if found := re.fullmatch(pattern, asked):
            return f"<calc>{found['a']}{sign}{found['b']}</calc>"
    raise AssertionError(asked)


def perfect_guess(prompt, answers):
    return "100" if not answers else answers[-1]["content"].replace("_", "0")


@pytest.mark.parametrize(("name", "speak"), [("calculator", perfect_calculator), ("guess", perfect_guess)])
def test_a_perfect_player_solves_all_tasks(tasks, name, speak):
    score, solved = outcomes(tasks, name, speak)
    assert min(score, solved) >= 0.98


@pytest.mark.parametrize("fixed", ["555", "628", "317", ""])
def test_a_fixed_guess_scores_little(tasks, fixed):
    assert max(outcomes(tasks, "guess", lambda prompt, answers: fixed)) < 0.2


@pytest.mark.parametrize(("name", "speak"), [("calculator", perfect_calculator), ("guess", perfect_guess)])
def test_a_play_without_a_second_turn_scores_little(tasks, name, speak):
    assert max(outcomes(tasks, name, speak, turns=1)) < 0.2


def test_training_and_held_out_tasks_are_disjoint(tasks):
    for name, key in (("calculator", "answer"), ("guess", "code")):
        train, held_out = split(tasks, name, "train"), split(tasks, name, "held_out")
        asked = [{row["prompt"][-1]["content"] for row in rows} for rows in (train, held_out)]
        assert len(asked[0]) == len(train) and not asked[0] & asked[1]
        if key == "code":
            assert not {row["code"] for row in train} & {row["code"] for row in held_out}
    numbers = [
        {tuple(sorted(re.findall(r"\d+", row["prompt"][-1]["content"]))) for row in split(tasks, "calculator", each)}
        for each in ("train", "held_out")
    ]
    assert not numbers[0] & numbers[1]


def test_prompts_show_the_format(tasks):
    assert all("<calc>12*34</calc><result>408</result>" in row["prompt"][2]["content"] for row in tasks["calculator"])
    for row in tasks["guess"]:
        shown, answer, after = (turn["content"] for turn in row["prompt"][2:5])
        assert guess.GUESS.fullmatch(shown) and guess.GUESS.fullmatch(after)
        assert after.startswith(answer.rstrip("_"))
