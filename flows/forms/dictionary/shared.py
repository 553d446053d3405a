"""Words and values that several libraries share."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from prefect_rlhf.flows.forms.dictionary.rule import Rule, Untranslatable

SCHEDULES: Mapping[str, str] = MappingProxyType(
    {
        "constant": "constant",
        "constant_with_warmup": "constant",
        "linear": "linear",
        "cosine": "cosine",
        "cosine_with_min_lr": "cosine",
    }
)
"""Schedules of the learning rate, as transformers names them."""
TRACKERS: Mapping[str, str] = MappingProxyType(
    {"wandb": "wandb", "mlflow": "mlflow", "tensorboard": "tensorboard", "tensorboardX": "tensorboard"}
)
ESTIMATORS: Mapping[str, str] = MappingProxyType(
    {"k1": "k1", "kl": "k1", "k2": "k2", "mse": "k2", "k3": "k3", "low_var_kl": "k3", "k1+": "k2", "k3+": "k2"}
)
"""Estimators of the KL. A plus has the gradient of k2."""
FILE_ENDINGS = (".parquet", ".json", ".jsonl")
MOST_FUNCTIONS = 64
OF_TRL = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")
"""TRL's reward functions that need no argument."""
GREEDY = "temperature 0 always takes the likeliest token"
"""Why an option of sampling has no effect."""
YOUR_FILE = "rewards.py"
"""The file of rewards that a parameter file names if the other library has built-in rewards."""


def listed(value: Any) -> list[Any]:
    """Return a list unchanged, an empty list for no value, and a single value as a list.

    >>> listed(None), listed("wandb"), listed(["a", "b"])
    ([], ['wandb'], ['a', 'b'])
    """
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def passes(number: Any) -> int | None:
    """Return the number of passes over the data. Raises Untranslatable for a fraction of a pass.

    >>> passes(3.0)
    3
    """
    if not isinstance(number, int | float) or isinstance(number, bool):
        return None
    if number != math.floor(number) or number < 1:
        raise Untranslatable(f"{number:g} is not a whole number of passes; state steps")
    return int(number)


def files_of(name: Any, split: Any, config: Any = None) -> str | None:
    """Return the path of a dataset's split. A name becomes the files that the Hub has for it; files are kept.

    >>> files_of("trl-lib/tldr", "train"), files_of("data/mine.jsonl", "train")
    ('hf://datasets/trl-lib/tldr/data/train-*.parquet', 'data/mine.jsonl')
    """
    if not isinstance(name, str) or not name:
        return None
    if name.startswith(("/", ".", "~", "hf://")) or name.endswith(FILE_ENDINGS) or name.count("/") > 1:
        return name
    if not re.fullmatch(r"[\w.-]+", str(split)):
        raise Untranslatable(f"{split} is a part of a split; state a file's path instead")
    return f"hf://datasets/{name}/{config or 'data'}/{split}-*.parquet"


def functions_by_name(names: Sequence[Any], weights: Sequence[Any]) -> dict[str, Any] | None:
    """Return the reward functions that a TRL script names, with their weights; None if it names no function.

    >>> functions_by_name(["my_rewards.exact"], [0.5])
    {'exact': {'function': 'my_rewards:exact', 'signature': 'trl', 'weight': 0.5}}
    """
    if weights and len(weights) != len(names):
        raise Untranslatable(f"{len(weights)} weights of {len(names)} functions")
    functions: dict[str, Any] = {}
    for name, weight in zip(map(str, names[:MOST_FUNCTIONS]), weights or [1.0] * len(names), strict=False):
        module, _, last = name.rpartition(".")
        place = module or ("trl.rewards" if name in OF_TRL else YOUR_FILE)
        function = {"function": f"{place}:{last}", "signature": "trl"}
        functions[re.sub(r"\W", "_", last)] = function | ({} if weight == 1 else {"weight": float(weight)})
    return functions or None


ADAPTER = "only plain adapters are trained: adapter.rank, adapter.alpha, adapter.target_modules and adapter.rslora"
NO_DROPOUT = "an adapter has no dropout here"
NOT_QUANTISED = (
    "weights are not quantised, but for base_dtype nf4: the frozen matrices below an adapter then have four bits"
)
BY_PEFT = ("q_proj", "v_proj")
"""The matrices that PEFT adapts in all of our families if none are stated."""


def adapter(role: str, options: Mapping[str, str], is_on: Callable[[Any], bool], off: str) -> tuple[Rule, ...]:
    """Return the rules for a role's adapter.

    `options` names its `rank` and `alpha`, and optionally `matrices`, `dropout`, `rslora` and `path`; `on` may name the
    option that enables it. `off` says why a job has no adapter.
    """

    def matrices(job: Any) -> list[Any]:
        return listed(job[options["matrices"]]) or list(BY_PEFT)

    def no_dropout(job: Any) -> None:
        if is_on(job) and job[options["dropout"]]:
            raise Untranslatable(NO_DROPOUT)

    def rule(name: str, formula: str, by: Callable[[Any], Any] | None = None) -> Rule:
        return Rule(f"{role}.adapter.{name}", formula, by=by, when=is_on, otherwise=off)

    found = [
        rule("rank", f"{options['rank']} {options.get('on', '')}", lambda job: job[options["rank"]]),
        rule("alpha", options["alpha"]),
        rule("target_modules", options["matrices"], matrices),
    ]
    if "dropout" in options:
        found.append(Rule("", options["dropout"], by=no_dropout, where="check"))
    if "rslora" in options:
        found.append(rule("rslora", options["rslora"], lambda job: True if job[options["rslora"]] else None))
    if "path" in options:
        found.append(rule("path", options["path"]))
    return tuple(found)


MOVING_REFERENCE = "no flow averages the weights of the policy itself; algo.follow averages those of its reference"
TRAINED_POLICY = "the trained log-probabilities would not be the policy's"
PLAN = "the plan does it; results do not depend on it"
ENTROPY = "no loss here has an entropy bonus; actor_train.entropy is a metric"
NO_SUCH_LOSS = "no loss here has it; docs/authoring.md shows how to add your own"
TEMPLATE = "put the template into the model's folder, as chat_template.jinja"
