"""Answers a key of TRL, verl or OpenRLHF that somebody used among our parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

from prefect_rlhf.flows.forms.dictionary import openrlhf_options, trl_options, verl_options
from prefect_rlhf.flows.forms.dictionary.dialect import Dialect
from prefect_rlhf.flows.forms.dictionary.rule import Rule
from prefect_rlhf.flows.forms.dictionary.settings_here import ROWS, default_of

Has = Callable[[str], bool]
"""Whether a flow has a parameter, by its dotted name."""
OF_PPO: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"algo.optimizer": ("algo.actor_optimizer", "algo.critic_optimizer"), "algo.clip_low": ("algo.clip",),
     "algo.clip_high": ("algo.clip",)}
)  # fmt: skip
"""The names that PPO has in place of GRPO's."""
SYMBOLS: Mapping[Any, str] = MappingProxyType({"max_completion_length": "the number of algo.sampling.max_new_tokens"})
"""Words that tables use for another option's value."""
SHORT = frozenset({"horizon", "logger", "nnodes", "shuffle", "truncation", "strategy"})
"""Last parts of options that are plain words but are still answered when they stand alone."""
GROUPS = frozenset(
    {"actor_rollout_ref", "trainer", "algorithm", "reward_model", "data", "ray_kwargs", "ds", "ckpt", "logger",
     "rollout", "train", "eval", "vllm"}
)  # fmt: skip
"""Groups of options of verl and OpenRLHF, none of which is a parameter here."""
FEW = 6  # options of a group that is answered by its name
ALGORITHMS: Mapping[str, str] = MappingProxyType({"gae": "ppo", "remax": "remax"})
"""Advantages of verl and OpenRLHF that are algorithms of their own here."""
WHOLE_FILE = "prefect-rlhf translate FILE translates a whole file of TRL, verl or OpenRLHF"


def answer(option: str, has: Has | None = None) -> str:
    """Return the parameters that replace an option of another trainer, or the reason why it needs or has none.

    Empty for any other word. With `has`, the answer names only parameters that this flow has.

    >>> answer("--num_generations")
    'here: algo.samples_per_prompt'
    >>> answer("lora_rank")
    'here: actor.adapter.rank, critic.adapter.rank, reward.adapter.rank'
    >>> answer("logging_steps")
    'leave it out: every step is logged'
    >>> answer("generation_batch_size")
    'here: algo.batch_size = generation_batch_size / num_generations: TRL counts responses'
    """
    word = verl_options.plain(option.lstrip("-")).replace("-", "_")
    found = list(_meanings(word, has))
    rules = [rule for rule, _ in found if rule is not None]
    if texts := _named(rules, has):
        return f"here: {texts}"
    if rules:
        return f"this algorithm has no such parameter; of others it is {_named(rules, None)}"
    reasons = [reason for rule, reason in found if rule is None]
    if not reasons:
        return ""
    refused = [why for what, why in reasons if what == "refused"]
    return f"here: {refused[0]}" if refused else f"leave it out: {reasons[0][1]}"


def meant_by(path: str, word: object, has: Has | None = None) -> str:
    """Return our parameters that a word of another trainer means at `path`; empty for any other word.

    >>> meant_by("algo.loss", "dr_grpo")
    'here: algo.mean_over: the number of algo.sampling.max_new_tokens, algo.advantage: dr_grpo'
    >>> meant_by("algo.kl.estimator", "low_var_kl")
    'here: k3'
    """
    if not isinstance(word, str):
        return ""
    if path == "algo.advantage" and word in ALGORITHMS:
        return f"here an algorithm of its own: prefect-rlhf run {ALGORITHMS[word]}"
    found: dict[str, Any] = {}
    for dialect in every_dialect():
        for rule in dialect.rules:
            if word in rule.words and (has is None or has(rule.ours)):
                found.setdefault(rule.ours, SYMBOLS.get(rule.words[word], rule.words[word]))
    group = path.rpartition(".")[0]
    others = [
        f"{ours}: {value}"
        for ours, value in found.items()
        if ours != path and ours.rpartition(".")[0] == group and value != default_of("grpo", ours)
    ]
    if others:
        return f"here: {', '.join(others)}"
    return f"here: {found[path]}" if path in found and found[path] != word else ""


def is_foreign(option: str) -> bool:
    """Whether the option belongs to another trainer, or to a group that only others have."""
    return bool(answer(option)) or option.partition(".")[0] in GROUPS


@cache
def every_dialect() -> tuple[Dialect, ...]:
    """Return the trainers of all libraries."""
    return (*trl_options.dialects(), *verl_options.dialects(), *openrlhf_options.dialects())


def _meanings(word: str, has: Has | None) -> Iterator[tuple[Rule | None, tuple[str, str]]]:
    """Yield the rules of a word in each dialect, and otherwise whether it is refused or without effect, and why.

    Trainers with the rows of the flow at hand come first.
    """
    near = [dialect for dialect in every_dialect() if has is not None and has(ROWS[dialect.flow])]
    options = {dialect: _options(dialect, word) for dialect in near}
    if not any(options.values()):
        options = {dialect: _options(dialect, word) for dialect in every_dialect()}
    whole = {dialect: names for dialect, names in options.items() if word in names}
    for dialect, names in (whole or options).items():
        for option in names:
            rules = [rule for rule in dialect.rules_of(option) if rule.where != "check"]
            yield from ((rule, ("", "")) for rule in rules)
            if rules:
                continue
            if (refusal := dialect.refusal_of(option)) is not None:
                yield None, ("refused", refusal.reason)
            elif (reason := dialect.effect_of(option)) is not None:
                yield None, ("without effect", reason)


def _options(dialect: Dialect, word: str) -> list[str]:
    """Return the options of a dialect that a word may be: the whole name, its name of old, or the last parts of it."""
    every = _all_options(dialect)
    if dialect.library == "openrlhf" and word in (old := openrlhf_options.old_names(dialect.trainer)):
        return [name for name in old[word] if dialect.knows(name)]
    if word in every:
        return [word]
    ends = [option for option in every if option.endswith(f".{word}")] if _is_distinctive(word) else []
    least = min((option.count(".") for option in ends), default=0)
    nearest = [option for option in ends if option.count(".") == least]
    if nearest:
        return nearest
    inside = [option for option in every if option.startswith(f"{word}.")]
    return inside if len(inside) <= FEW else []


def _is_distinctive(word: str) -> bool:
    return "_" in word or "." in word or word in SHORT


def _all_options(dialect: Dialect) -> dict[str, None]:
    return _named_options(dialect.library, dialect.trainer)


@cache
def _named_options(library: str, trainer: str) -> dict[str, None]:
    (dialect,) = [one for one in every_dialect() if (one.library, one.trainer) == (library, trainer)]
    of_rules = [option for rule in dialect.rules for option in rule.options]
    of_tables = [option for option in (*dialect.refused, *dialect.without_effect) if "*" not in option]
    return dict.fromkeys((*dialect.defaults, *of_rules, *of_tables))


def _named(rules: list[Rule], has: Has | None) -> str:
    """Return the names of the rules' parameters, or their arithmetic."""
    names: dict[str, None] = {}
    texts: dict[str, None] = {}
    for rule in rules:
        for ours in _names_here(rule, has):
            if rule.arithmetic:
                texts[rule.arithmetic.replace(rule.ours, ours, 1)] = None
            else:
                names[ours] = None
    plain = [name for name in names if not any(text.startswith(f"{name} =") for text in texts)]
    return "; ".join(filter(None, (", ".join(_with_ppos(plain, has)), *texts)))


def _names_here(rule: Rule, has: Has | None) -> list[str]:
    """Return the names of a rule's parameter in the flow at hand."""
    if rule.where == "plan":
        return [f"placement.CALL.{rule.ours}"]
    if has is None or has(rule.ours):
        return [rule.ours]
    for grpos, ppos in OF_PPO.items():
        if rule.ours == grpos or rule.ours.startswith(f"{grpos}."):
            return [name for each in ppos if has(name := each + rule.ours.removeprefix(grpos))]
    return []


def _with_ppos(names: list[str], has: Has | None) -> list[str]:
    """Return the names, those of PPO alone in brackets behind those of others; with a flow at hand, as they are."""
    if has is not None:
        return names
    others = {ppo + name.removeprefix(grpos): name for name in names for grpos, ppos in OF_PPO.items()
              if name == grpos or name.startswith(f"{grpos}.") for ppo in ppos}  # fmt: skip
    plain = [name for name in names if name not in others]
    return [name + _brackets([ppo for ppo, grpos in others.items() if grpos == name]) for name in plain]


def _brackets(names: list[str]) -> str:
    return f" (for PPO {', '.join(dict.fromkeys(names))})" if names else ""
