"""Typed settings for algorithms: the UI shows them as a form, and an unknown key is refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from prefect_rlhf.errors.by_hand import ByHand
from prefect_rlhf.errors.wrong_setting import not_used, wrong
from prefect_rlhf.placement.models.model import Schedule

MOST_STEPS = 1_000_000
MOST_UPDATES = 1 << 40  # optimizer steps of a run
MOST_ROWS = 1 << 20  # of a step; its tokens and log-probabilities are in memory together
LOWEST_TEMPERATURE = 0.01  # above 0; vLLM's own bound

Staleness = Annotated[
    int, Field(ge=0, le=1, description="Steps by which responses may be older than the newest weights; 0 is on-policy.")
]
"""With 1, the next step's responses are generated while this step's are trained on."""

GREEDY: Mapping[str, tuple[int, str]] = MappingProxyType(
    {"temperature": (0, "above 0"), "top_k": (1, "0 or at least 2"), "min_p": (1, "below 1")}
)
"""Settings that make sampling greedy: for each, the value that does so, and which values do not."""

StopString = Annotated[str, Field(min_length=1, max_length=256)]

Decay = Annotated[float, Field(ge=0, lt=1)]
"""How much the old value counts in a moving average."""


class Settings(ByHand):
    """Base class for settings, also for your own: frozen, with exact types, and an unknown key is an error.

    Numbers must be finite. Types are exact wherever a value comes from: true is not 1, and "5" is not 5. If your own
    field should accept more types, give it `Field(strict=False)`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def only_at_start(self) -> tuple[str, ...]:
        """Return the fields that only a run's first step reads, such as the initial value of a state.

        You cannot change them when you resume: the checkpoint already has the state that they led to.
        """
        return ()


class Product(int):
    """A product of settings, rounded up to a whole number. An error about it shows the settings.

    >>> size = Product(batch_size=30, over_sampling=2.0)
    >>> size, size.written, size + 1
    (60, '30 x 2 = 60', 61)
    """

    factors: Mapping[str, float]

    def __new__(cls, **factors: float) -> Product:
        """Multiply settings, which are given by name."""
        made = super().__new__(cls, math.ceil(math.prod(factors.values())))
        made.factors = MappingProxyType(factors)
        return made

    @property
    def written(self) -> str:
        """The product as you would write it."""
        rounded = "" if math.prod(self.factors.values()) == self else ", rounded up"
        return f"{' x '.join(f'{factor:g}' for factor in self.factors.values())} = {int(self)}{rounded}"


class Sampling(Settings):
    """How responses are sampled."""

    max_new_tokens: int = Field(24, ge=1, le=1 << 20, description="Longest response, in tokens.")
    temperature: float = Field(1.0, ge=0, le=2, description="0 is greedy; else 0.01 to 2, as vLLM accepts it.")
    top_p: float = Field(1.0, ge=0.001, le=1, description="Nucleus sampling; 1 keeps the whole distribution.")
    stop_at_eos: bool = Field(True, description="End a response at the end-of-sequence token.")
    top_k: int = Field(0, ge=0, le=1 << 24, description="Sample among this many likeliest tokens; 0 is all.")
    min_p: float = Field(
        0.0, ge=0, le=1, description="Lowest probability that a token may have, as a share of the highest."
    )
    stop: tuple[StopString, ...] = Field(
        (),
        strict=False,
        max_length=16,
        description="Strings that end a response; the token that completes a string is kept.",
    )

    @field_validator("temperature")
    @classmethod
    def _greedy_or_warm(cls, temperature: float) -> float:
        """Refuse values between: engines would treat them as greedy, or divide by almost 0."""
        if 0 < temperature < LOWEST_TEMPERATURE:
            raise PydanticCustomError("temperature", f"0, which is greedy, or at least {LOWEST_TEMPERATURE}")
        return temperature

    @model_validator(mode="after")
    def _is_used(self) -> Sampling:
        """Refuse settings of chance where the likeliest token is always taken."""
        why = next((one for one, (value, _) in GREEDY.items() if getattr(self, one) == value), None)
        fields = {name: type(self).model_fields[name].default for name in ("top_p", "top_k", "min_p")}
        unused = [name for name, default in fields.items() if name != why and getattr(self, name) != default]
        if why is not None and unused:
            value, right = GREEDY[why]
            raise not_used(unused[0], f"{why} {value} always takes the likeliest token", f"set {why}: {right}")
        return self

    def greedy(self) -> Sampling:
        """Return settings with the same lengths and stops that always take the likeliest token."""
        return self.model_copy(update={"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0})


class Optimizer(Settings):
    """AdamW with a linear warm-up, followed by a learning rate schedule."""

    lr: float = Field(1e-5, gt=0, le=10, description="Learning rate.")
    head_lr: float | None = Field(None, gt=0, le=10, description="Learning rate for a scalar head; empty: the same.")
    betas: tuple[Decay, Decay] = Field((0.9, 0.95), strict=False, description="Decay of the two moments.")
    eps: float = Field(1e-8, gt=0, le=1, description="Added to the root of the second moment.")
    weight_decay: float = Field(0.0, ge=0, le=10, description="Decoupled weight decay.")
    max_grad_norm: float = Field(1.0, gt=0, le=1e9, description="Gradients are clipped to this global norm.")
    warmup_steps: int = Field(0, ge=0, le=MOST_STEPS, description="Optimizer steps until the learning rate is reached.")
    schedule: Schedule = Field("constant", description="Learning rate after the warm-up: constant, or falling.")
    decay_steps: int | None = Field(
        None,
        ge=1,
        le=MOST_UPDATES,
        description="Optimizer steps until the rate has fallen; empty: the whole run.",
    )
    min_lr_ratio: float = Field(0.0, ge=0, lt=1, description="Final learning rate, as a share of lr.")

    @model_validator(mode="after")
    def _falls_after_the_warmup(self) -> Optimizer:
        """Refuse a setting that a constant rate does not use, and a fall that ends before it begins."""
        if self.schedule == "constant" and self.decay_steps is not None:
            raise not_used("decay_steps", "a constant rate does not fall", "set schedule: linear or cosine")
        if self.schedule == "constant" and self.min_lr_ratio > 0:
            raise not_used("min_lr_ratio", "a constant rate does not fall", "set schedule: linear or cosine")
        if self.decay_steps is not None and self.decay_steps <= self.warmup_steps:
            right = f"more than the {self.warmup_steps} warmup_steps; both count from the first step"
            raise wrong(self, "decay_steps", right)
        return self


class Update(Settings):
    """How a train_step goes over the step's rows: epochs and mini-batches."""

    epochs: int = Field(1, ge=1, le=1000, description="Passes over the rows.")
    mini_batches: int = Field(1, ge=1, le=MOST_ROWS, description="Optimizer steps per pass.")


class MovingReference(Settings):
    """A reference that follows the policy (TR-DPO, Gorbatovski et al. 2024, arXiv:2404.09656)."""

    every: int | None = Field(
        None, ge=1, le=MOST_STEPS, description="Steps between versions of the reference; empty: it never changes."
    )
    share: float = Field(
        0.6, gt=0, le=1, description="With every: share of the policy in the next reference; 1 is a copy."
    )

    @model_validator(mode="after")
    def _makes_sense(self) -> MovingReference:
        """Refuse a share of a reference that never changes."""
        if self.every is None and self.share != MovingReference.model_fields["share"].default:
            raise not_used("share", "the reference never changes without every", "set every")
        return self


def by_dotted_name(group: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Return the values of nested groups by their dotted names; an empty group is a value.

    >>> by_dotted_name({"algo": {"lr": 0.1, "stop": []}, "columns": {}})
    {'algo.lr': 0.1, 'algo.stop': [], 'columns': {}}
    """
    found: dict[str, Any] = {}
    for name, value in group.items():
        inner = isinstance(value, Mapping) and value
        found |= by_dotted_name(value, f"{before}{name}.") if inner else {f"{before}{name}": value}
    return found


def set_by_dotted_name(values: dict[str, Any], name: str, value: Any) -> None:
    """Set the value with this dotted name in nested groups; a missing group is added.

    Raises ValueError if a part of the name is another value than a group.

    >>> values = {"steps": 3}
    >>> set_by_dotted_name(values, "algo.lr", 0.1)
    >>> values
    {'steps': 3, 'algo': {'lr': 0.1}}
    >>> set_by_dotted_name(values, "steps.first", 1)
    Traceback (most recent call last):
    ...
    ValueError: steps is not a group
    """
    *groups, last = name.split(".")
    for group in groups:
        values = values.setdefault(group, {})
        if not isinstance(values, dict):
            raise ValueError(f"{group} is not a group")
    values[last] = value
