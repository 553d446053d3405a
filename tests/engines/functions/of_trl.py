"""Reward functions for TRL. The first is `trl/rewards/format_rewards.py` of TRL 1.16.0, as it stands (Apache 2.0)."""

import asyncio
import re


def think_format_reward(completions: list[list[dict[str, str]]], **kwargs) -> list[float]:
    pattern = r"^<think>(?!.*<think>)(.*?)</think>.*$"
    completion_contents = [completion[0]["content"] for completion in completions]
    matches = [re.match(pattern, content, re.DOTALL | re.MULTILINE) for content in completion_contents]
    return [1.0 if match else 0.0 for match in matches]


def exact(completions, ground_truth, **kwargs):
    return [None if truth is None else float(c == truth) for c, truth in zip(completions, ground_truth, strict=True)]


def named_only(prompts, completions, ground_truth):
    return [len(p) + len(c) + len(t) for p, c, t in zip(prompts, completions, ground_truth, strict=True)]


def ids(completion_ids, **kwargs):
    return [sum(of_row) for of_row in completion_ids]


def columns(completions, **kwargs):
    assert set(kwargs) == {"prompts", "ground_truth", "log_extra", "log_metric"}, kwargs
    kwargs["log_extra"]("upper", [c.upper() for c in completions])
    kwargs["log_metric"]("longest", max(map(len, completions)))
    return [0.0 for _ in completions]


def logs_a_long_name(completions, log_metric, **kwargs):
    log_metric("n" * 1_000_000, 1.0)
    return [0.0 for _ in completions]


async def asynchronous(completions, **kwargs):
    async def one(completion):
        await asyncio.sleep(0.01)
        if completion == "bad":
            raise ValueError("bad")
        return len(completion)

    return await asyncio.gather(*map(one, completions))


def raises_on_bad(completions, **kwargs):
    if "bad" in completions:
        raise ValueError("bad")
    return [1.0 for _ in completions]


def hangs_on_bad(completions, **kwargs):
    while "bad" in completions:
        pass
    return [1.0 for _ in completions]


def drops_bad(completions, **kwargs):
    return [1.0 for completion in completions if completion != "bad"]


def nan_for_bad(completions, **kwargs):
    return [float("nan") if completion == "bad" else 1.0 for completion in completions]


def one_number(completions, **kwargs):
    return 1.0


def wants_trainer(completions, trainer_state, **kwargs):
    return [trainer_state.global_step for _ in completions]


def no_completions(prompts, answers):
    return [0.0 for _ in prompts]
