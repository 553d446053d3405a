"""All words of a placement, and placements with other values of them."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, replace
from itertools import product
from operator import attrgetter
from types import MappingProxyType
from typing import Any

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.devices.axes import AXES
from prefect_rlhf.placement.graph import Call, DataflowGraph
from prefect_rlhf.placement.plan import Placement
from prefect_rlhf.placement.words.cache import CACHE
from prefect_rlhf.placement.words.micro_batches import MICRO_BATCHES
from prefect_rlhf.placement.words.offload import OFFLOAD
from prefect_rlhf.placement.words.parts import PARTS
from prefect_rlhf.placement.words.prefetch import PREFETCH
from prefect_rlhf.placement.words.recompute import RECOMPUTE
from prefect_rlhf.placement.words.rows_first import ROWS_FIRST
from prefect_rlhf.placement.words.sequence_parallel import SEQUENCE_PARALLEL
from prefect_rlhf.placement.words.word import Word

_OURS: tuple[Word[Any], ...] = (
    MICRO_BATCHES,
    SEQUENCE_PARALLEL,
    RECOMPUTE,
    CACHE,
    OFFLOAD,
    PREFETCH,
    PARTS,
    ROWS_FIRST,
)
_WORDS: dict[str, Word[Any]] = {word.name: word for word in _OURS}
WORDS: Mapping[str, Word[Any]] = MappingProxyType(_WORDS)
"""Every word by its name. Words that save memory come in the order of the seconds that they usually lose."""
_VALUES = attrgetter(*(word.name for word in _OURS))  # a search asks for them many thousand times
_DEFAULTS = tuple(word.default for word in _OURS)
_FIELDS = {field.name for field in fields(Placement)}
_OTHER_KEYS = {"mesh", "engine", "order", *AXES}


def register(word: Word[Any]) -> None:
    """Add a word that is not part of this package, such as a word of an engine of your own.

    Placements, executions and settings keep its values as `registered`, and `Word.of` finds them there. Raises
    InvalidInput for the name of another word or key of a plan file.
    """
    taken = {**dict.fromkeys(_FIELDS | _OTHER_KEYS), **_WORDS}
    if word.name in taken and taken[word.name] is not word:
        raise InvalidInput("word", word.name, f"a name other than {', '.join(sorted(taken))}")
    _WORDS[word.name] = word


def stated(placement: Placement) -> list[Word[Any]]:
    """Return a placement's words that differ from their defaults."""
    values = _VALUES(placement)
    found = (
        []
        if values == _DEFAULTS
        else [word for word, value in zip(_OURS, values, strict=True) if value != word.default]
    )
    return found + [WORDS[name] for name, _ in placement.registered] if placement.registered else found


def having(placement: Placement, values: Mapping[str, Any]) -> Placement:
    """Return a placement with these values of words, or of other fields, by name."""
    others = {name: value for name, value in values.items() if name not in _FIELDS}
    if not others:
        return replace(placement, **values)
    every = {**dict(placement.registered), **others}
    kept = tuple((name, every[name]) for name in sorted(every) if every[name] != WORDS[name].default)
    return replace(placement, registered=kept, **{name: values[name] for name in values.keys() & _FIELDS})


def without(placement: Placement, words: Iterable[Word[Any]]) -> Placement:
    """Return a placement with the default values of these words."""
    return having(placement, {word.name: word.default for word in words})


def phrases(placement: Placement) -> Iterator[str]:
    """Yield a placement's stated words in plain language: `8 micro-batches`, `recompute all`."""
    return (word.phrase(word.of(placement)) for word in stated(placement) if word.phrase is not None)


def thriftiest(call: Call, placement: Placement, graph: DataflowGraph) -> Placement:
    """Return a call's placement with the value of each word that needs least memory."""
    usable = (word for word in WORDS.values() if word.may_have(call, placement.engine))
    values = {word.name: word.values(call, placement, graph) for word in usable}
    return having(placement, {name: each[-1] for name, each in values.items() if each})


def searched(call: Call, plain: Placement, graph: DataflowGraph) -> Iterator[Placement]:
    """Yield a call's placement with each combination of word values that a search tries completely."""
    words = [word for word in WORDS.values() if word.is_searched and word.may_have(call, plain.engine)]
    names = [word.name for word in words]
    for values in product(*(word.values(call, plain, graph) or (word.default,) for word in words)):
        yield having(plain, dict(zip(names, values, strict=True)))
