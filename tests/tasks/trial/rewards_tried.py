"""Reward functions that are tried before a run: right ones, and the mistakes of people."""

import os
import time
from pathlib import Path


def right(row):
    """Every column of the training and of the held-out rows."""
    assert row["hint"].startswith("hint") and isinstance(row["response"], str)
    return float(len(row["response_ids"]))


def right_of_trl(prompts, completions, completion_ids, hint, **columns):
    assert len(prompts) == len(completions) == len(hint) == len(columns["number"])
    return [float(len(ids)) for ids in completion_ids]


def right_of_verl(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(ground_truth in solution_str), "words": len(solution_str.split())}


def right_of_reasoning_gym(answer, entry):
    return float(answer == entry["answer"])


async def right_and_async(row):
    return None if row["number"] % 2 else 1.0


def misspelt(row):
    return float(row["answr"] == row["response"])


def misspelt_in_trl(completions, **columns):
    return [float(truth == said) for truth, said in zip(columns["answr"], completions, strict=True)]


def one_of_trl(completions):
    return [float(len(completion)) for completion in completions]


def misspelt_in_verl(data_source, solution_str, ground_truth, extra_info=None):
    return float(extra_info["indx"])


def of_training_rows_only(row):
    return float(len(row["number_in_training"]))


def in_some_rows(row):
    return float(row["facts"]["year"])


def wrong_name_in_the_last_row(row):
    return 1.0 if row["number"] < 5 else nothing_of_this_name  # noqa: F821


def no_number(row):
    return float(row["response"])


def not_a_number(row):
    return float("nan")


def beyond_the_bound(row):
    return 1e20


def never_applies(row):
    return None


def hangs(row):
    while True:
        time.sleep(0.1)


def dies(row):
    os._exit(3)


def notes(row):
    """Write down which rows it was called on."""
    with Path(row["file"]).open("a") as file:
        file.write(f"{row['number']}\n")
    return 1.0


def gives_text(row):
    return "1.0"


def gives_a_dict(row):
    return {"points": 1.0}


def gives_a_pair(row):
    return 1.0, "right"


def yields(row):
    yield 1.0


def makes_a_reward(row):
    return lambda response: 1.0


def gives_text_at_times(row):
    return 1.0 if row["number"] % 2 else "none"


def names_a_number_with_two_lines(row):
    return {"score": 1.0, "words\nin all": 2.0}


def logs_two_lines(completions, log_metric, **columns):
    log_metric("words\nin all", 2.0)
    return [1.0 for _ in completions]


def names_too_many_numbers(row):
    return {"score": 1.0} | {f"word {place}": 1.0 for place in range(70)}
