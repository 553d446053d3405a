"""Corrects unknown keys: another trainer's option gets its counterpart here, any other key similar keys."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from prefect_rlhf.errors.errors import InvalidInput, SeveralMistakes, UnknownKey
from prefect_rlhf.errors.in_short import MOST_CHARACTERS
from prefect_rlhf.flows.forms.shape import keys_of, types_at

MOST_PARTS = 8  # of the path of another trainer's option
MOST_LEAVES = 1000  # of an unknown group; more are not counted
FEW = 2  # unknown keys; a file with more of them is probably another trainer's
SAME_WORD = 0.7  # similarity above which the name of a group is a misspelt name of ours
Has = Callable[[str], bool]


def unknown_parameters(others: Mapping[str, Any], signature: inspect.Signature) -> InvalidInput:
    """Return the error for parameters that a flow does not have, with a correction for each, inside groups too."""
    names, has = list(signature.parameters), has_parameter(signature)
    found: list[UnknownKey] = []
    for name, value in others.items():
        leaves = list(_leaves(name, value))
        whole = [(name, value)] if len(leaves) == 1 else leaves
        found += [
            UnknownKey(field, seen, hint(path, names, "parameters", has))
            for (field, seen), (path, _) in zip(whole, leaves, strict=True)
        ]
    return several(found)


def several(unknown: Sequence[UnknownKey]) -> InvalidInput:
    """Return one error for several unknown keys. If many are another trainer's, it suggests `translate`."""
    if len(unknown) <= FEW:
        return SeveralMistakes.of(unknown)
    # Imported here, as below: right parameters need no dictionary.
    from prefect_rlhf.flows.forms.dictionary.answer import WHOLE_FILE, is_foreign

    is_theirs = sum(is_foreign(each.field) for each in unknown) > FEW
    return SeveralMistakes.of(unknown, f"({WHOLE_FILE})" if is_theirs else "")


def hint(word: str, keys: Sequence[str], noun: str = "keys", has: Has | None = None) -> str:
    """Return the correction for an unknown key: its replacement here, the closest of `keys`, or all of them.

    `word` may be the path of another trainer's option: `actor_rollout_ref.actor.optim.lr` is answered as `optim.lr`.
    """
    from prefect_rlhf.flows.forms.dictionary.answer import GROUPS, WHOLE_FILE, answer

    parts = word[:MOST_CHARACTERS].split(".")
    near = get_close_matches(parts[0], keys)
    if len(parts) == 1 or not get_close_matches(parts[0], keys, cutoff=SAME_WORD):
        paths = [".".join(parts[start:]) for start in range(len(parts))]
        for option in paths if parts[0] in GROUPS else [*paths, parts[0]]:
            if foreign := answer(option, has):
                return foreign
        if parts[0] in GROUPS:
            return f"a group of verl or OpenRLHF; {WHOLE_FILE}"
    return f"closest: {', '.join(near)}" if near else f"the {noun} are {', '.join(keys)}"


def meaning(field: str, value: object, has: Has | None = None) -> str:
    """Return our parameters that another trainer's word means when used at `field`, which does not have it."""
    from prefect_rlhf.flows.forms.dictionary.answer import meant_by

    return meant_by(field, value, has)


def has_parameter(signature: inspect.Signature) -> Has:
    """Return a function that says whether a flow has a parameter with this dotted name."""

    def has(path: str) -> bool:
        name, *fields = path.split(".")
        if name not in signature.parameters:
            return False
        annotation = signature.parameters[name].annotation
        return not fields or fields[-1] in keys_at(annotation, fields[:-1])

    return has


def keys_at(annotation: Any, place: Sequence[str]) -> list[str]:
    """Return the fields of the settings groups at a place within a type, or an empty list if it has no group."""
    return keys_of(types_at(annotation, place))


def _leaves(path: str, value: Any) -> list[tuple[str, Any]]:
    """Return the values of a group by their dotted paths, or else a value by its name.

    >>> _leaves("algorithm", {"kl_ctrl": {"kl_coef": 0.1}})
    [('algorithm.kl_ctrl.kl_coef', 0.1)]
    """
    found: list[tuple[str, Any]] = []
    left = [(path, value)]
    while left and len(found) < MOST_LEAVES:
        path, value = left.pop(0)
        if isinstance(value, Mapping) and value and path.count(".") < MOST_PARTS - 1:
            left = [(f"{path}.{key}", one) for key, one in list(value.items())[:MOST_LEAVES]] + left
        else:
            found.append((path, value))
    return found
