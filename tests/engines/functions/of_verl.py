"""Score functions for verl. The first two are `verl/utils/reward_score/gsm8k.py` of verl 0.9.1 (Apache 2.0), shortened
by its flexible method; the third has the arguments that `NaiveRewardManager` gives."""

import re


def extract_solution(solution_str):
    solutions = re.findall("#### (\\-?[0-9\\.\\,]+)", solution_str[-300:])
    return solutions[-1].replace(",", "").replace("$", "") if solutions else None


def gsm8k(solution_str, ground_truth, format_score=0.0, score=1.0):
    answer = extract_solution(solution_str=solution_str)
    if answer is None:
        return 0
    return score if answer == ground_truth else format_score


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "openai/gsm8k"
    right = gsm8k(solution_str, ground_truth)
    return {"score": right * extra_info["index"], "acc": bool(right), "pred": str(solution_str), "turns": 2}


async def asynchronous(data_source, solution_str, ground_truth, extra_info, **kwargs):
    return gsm8k(solution_str, ground_truth)


def with_huge_numbers(data_source, solution_str, ground_truth, extra_info):
    return {"score": 1.0, "a": 1.7e308, "b": 10**400, "c": -1e29}


def with_many_numbers(data_source, solution_str, ground_truth, extra_info):
    return {"score": 1.0, **{f"number {place}": 1.0 for place in range(65)}}


def with_a_long_name(data_source, solution_str, ground_truth, extra_info):
    return {"score": 1.0, "n" * 101: 1.0}


def without_score(data_source, solution_str, ground_truth, extra_info):
    return {"acc": 1.0}
