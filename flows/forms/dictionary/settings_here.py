"""Our settings that translations set: their defaults, and whether a value is accepted."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from prefect_rlhf.errors.right_value import right_value
from prefect_rlhf.flows.forms.options import RunOptions
from prefect_rlhf.tasks.rl.settings.offline import DPO, KTO, SFT
from prefect_rlhf.tasks.rl.settings.online import GRPO, PPO, ReMax, Reward

SETTINGS: Mapping[str, type[BaseModel]] = MappingProxyType(
    {"ppo": PPO, "grpo": GRPO, "remax": ReMax, "dpo": DPO, "kto": KTO, "sft": SFT, "reward": Reward}
)
"""The settings of each algorithm: its parameter `algo`."""
ROWS: Mapping[str, str] = MappingProxyType(
    {"ppo": "prompts", "grpo": "prompts", "remax": "prompts", "dpo": "pairs", "kto": "answers", "sft": "chats",
     "reward": "pairs"}
)  # fmt: skip
"""The parameter of each algorithm that names its rows."""
_OTHERS: Mapping[str, Any] = MappingProxyType(
    {"dtype": "bfloat16", "split_column": "split", "split": "train", "chat_template": False, "chat_template_kwargs": {},
     "prompt_column": "prompt", "chosen_column": "chosen", "rejected_column": "rejected", "text_column": "text",
     "end_of_text": False, "overlong_prompts": "refuse", "head": "lm", "new_head": False, "staleness": 0}
)  # fmt: skip
"""Defaults of fields of models and datasets, whose classes are blocks, which load Prefect; and of a flow's own."""


def default_of(flow: str, path: str) -> Any:
    """Return the default of a parameter of a flow; None if it has none.

    >>> default_of("grpo", "algo.sampling.max_new_tokens"), default_of("ppo", "steps")
    (24, 10)
    """
    group, *fields = path.split(".")
    value: Any = _whole(flow) if group == "algo" else RunOptions()
    if group != "algo" and (fields := path.split("."))[0] not in RunOptions.model_fields:
        return _OTHERS.get(fields[-1])
    for name in fields:
        value = getattr(value, name, None)
    return list(value) if isinstance(value, tuple) else value


@cache
def _whole(flow: str) -> BaseModel:
    return SETTINGS[flow]()


def refused_value(flow: str, path: str, value: Any) -> str:
    """Return why a parameter does not accept a value; the text is empty if it does, or if only a run can tell.

    >>> refused_value("grpo", "algo.sampling.temperature", 3.0)
    'at most 2'
    """
    kind: type[BaseModel] = SETTINGS[flow] if path.startswith("algo.") else RunOptions
    *groups, last = path.removeprefix("algo.").split(".")
    for name in groups:
        found = _group(kind.model_fields[name].annotation) if name in kind.model_fields else None
        if found is None:
            return ""
        kind = found
    if last not in kind.model_fields:
        return ""
    field = kind.model_fields[last]
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(Annotated[field.annotation, field], config=None)  # type: ignore[arg-type]  # a form that mypy does not know
        adapter.validate_json(json.dumps(value))
    except ValidationError as error:
        return right_value(error.errors()[0])
    return ""


def _group(annotation: Any) -> type[BaseModel] | None:
    kinds = (annotation, *getattr(annotation, "__args__", ()))
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
