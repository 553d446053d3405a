"""Utilisation of a device: the FLOPs that a work needs over those that the device could have done meanwhile."""

from __future__ import annotations

from benchmarks.one_card.work import SIZES, Work
from prefect_rlhf.placement.cost.datasheets.kinds import DATASHEETS

PEAK_FLOPS = DATASHEETS["h100"].bfloat16_flops
FORMULA = (
    "FLOPs: 2 x parameters x tokens forward, twice that backward; parameters are all of the model, the tied embedding "
    "once, for the head. *_with_attention adds 4 x pairs x layers x heads x head width forward, pairs causal: length^2 "
    "/ 2 a row. A step: the forward of each prompt once and of each response token, then forward and backward of all "
    f"rows. Over seconds x {PEAK_FLOPS / 1e12:.0f} TFLOP/s, an H100's by its datasheet for dense bfloat16"
)


def train_flops(work: Work, parameters: int, *, attention: bool) -> float:
    """FLOPs of forward and backward of all rows of a step."""
    return 3 * forward_flops(work, parameters, work.rows, attention=attention)


def forward_flops(work: Work, parameters: int, rows: int, *, attention: bool) -> float:
    """FLOPs of the forward of some whole rows."""
    pairs = rows * work.length**2 / 2
    return 2.0 * parameters * rows * work.length + (_pair_flops(work) * pairs if attention else 0.0)


def step_flops(work: Work, parameters: int, *, attention: bool) -> float:
    """FLOPs of a step: generation, each prompt once, then training."""
    generated = work.batch_size * work.prompt_tokens + work.rows * work.response_tokens
    pairs = work.batch_size * work.prompt_tokens**2 / 2
    pairs += work.rows * (work.length**2 - work.prompt_tokens**2) / 2
    flops = 2.0 * parameters * generated + (_pair_flops(work) * pairs if attention else 0.0)
    return flops + train_flops(work, parameters, attention=attention)


def utilisation(work: Work, parameters: int, step_seconds: float, train_seconds: float) -> dict[str, float]:
    """Return MFU of the train_step and of the step, and tokens a second."""
    found = {
        "tokens_per_second": work.rows * work.length / step_seconds,
        "response_tokens_per_second": work.rows * work.response_tokens / step_seconds,
    }
    if work.kind == "cuda":
        for words, attention in (("", False), ("_with_attention", True)):
            train, step = (flops(work, parameters, attention=attention) for flops in (train_flops, step_flops))
            found[f"train_mfu{words}"] = train / train_seconds / PEAK_FLOPS
            found[f"step_mfu{words}"] = step / step_seconds / PEAK_FLOPS
    return {name: round(value, 4) for name, value in found.items()}


def _pair_flops(work: Work) -> float:
    size = SIZES[work.size]
    return 4.0 * size.layers * size.hidden
