"""A word of a placement: everything that plan files, checks, searches, costs, engines and people need to know about
it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar, cast

from prefect_rlhf.errors.errors import InvalidInput, NotUsed
from prefect_rlhf.placement.engine_traits import TRAITS, EngineTraits
from prefect_rlhf.placement.graph import Call, CallKind, DataflowGraph
from prefect_rlhf.placement.plan import EngineKind, Placement

T = TypeVar("T")
MOST = 1 << 20
"""The highest number that a plan file may state, of devices, layers, rows or GiB."""
EVERY_KIND: tuple[CallKind, ...] = ("generate", "inference", "train_step", "compute")


class Worded(Protocol):
    """A value that has words: ours as fields, and other packages' in `registered`, by name."""

    @property
    def registered(self) -> tuple[tuple[str, Any], ...]: ...


def _nothing(call: Call, placement: Placement, graph: DataflowGraph) -> Iterator[InvalidInput]:
    yield from ()


def _no_values(call: Call, placement: Placement, graph: DataflowGraph) -> Sequence[Any]:
    return ()


def _no_fields(placement: Placement) -> Mapping[str, Any]:
    return {}


def every_engine(traits: EngineTraits) -> bool:
    """Offer a word in every engine."""
    return True


@dataclass(frozen=True, kw_only=True, eq=False)  # without slots, which a generic class of Python 3.11 cannot have
class Word(Generic[T]):
    """A word of a placement.

    The fields' defaults describe the simplest word: every call may have it, and only its file reads it. A word's
    default value is never wrong, and has no effect, no setting and no phrase.
    """

    name: str
    """Its key in a plan file, its name in `-p placement.CALL.WORD=`, and its field of a placement, if it has one."""
    default: T
    type: Any
    """The type of its values, as pydantic reads it."""
    description: str
    """Its line in a form and on the page of parameters."""
    calls: tuple[CallKind, ...] = EVERY_KIND
    """The kinds of call that may have it."""
    other_calls: str = ""
    """Why another kind of call may not have it. The text completes a sentence: `a call of kind inference ...`."""
    offered: Callable[[EngineTraits], bool] | None = None
    """Whether an engine with these traits offers it; None if the engine's traits name it."""
    other_engines: Callable[[EngineKind], str] = "{} does not offer it".format
    """Why a call of another engine may not have it."""
    wrong: Callable[[Call, Placement, DataflowGraph], Iterator[InvalidInput]] = _nothing
    """Further checks of its value, in a call that may have it."""
    values: Callable[[Call, Placement, DataflowGraph], Sequence[T]] = _no_values
    """The values that a legal call may have, from the fastest to the smallest in memory; empty if it saves no
    memory."""
    is_searched: bool = False
    """Whether the search tries each of `values` with all others. Words that are not searched so have a search of their
    own."""
    saves: Literal["never", "first", "later"] = "never"
    """Whether a plan that does not fit uses the last of `values` before copies of weights leave their devices, or
    after. Within each group, words come in the order of the table."""
    moves_nothing: bool = False
    """Whether it only changes how a call computes, and no node of the augmented graph."""
    of_copy: bool = False
    """Whether all calls with a common copy of weights have the same value."""
    rebuilds: bool = False
    """Whether an engine with another value has to be built anew."""
    of_evaluation: bool = False
    """Whether an evaluation call has the value of the call whose copy of weights it uses."""
    is_complex: bool = False
    """Whether you need to know it to understand the plan: among nearly equal plans, fewer such words win."""
    is_written: bool = False
    """Whether a plan file that we write also has its default, for engines that offer it."""
    effect: Callable[[Placement], Mapping[str, Any]] = _no_fields
    """Fields of `Execution` that its value sets, which costs and bytes depend on."""
    setting: Callable[[Placement], Mapping[str, Any]] = _no_fields
    """Fields of the engine's `TrainSettings` that its value sets."""
    phrase: Callable[[T], str] | None = None
    """Its value for people, such as `8 micro-batches`; None if it is not mentioned."""

    def of(self, placed: Worded) -> T:
        """Return the word's value in a placement, or in an execution or settings made from a placement."""
        try:
            return cast(T, getattr(placed, self.name))
        except AttributeError:
            return cast(T, dict(placed.registered).get(self.name, self.default))

    def is_offered(self, engine: EngineKind) -> bool:
        """Whether an engine offers the word."""
        traits = TRAITS[engine]
        return self.name in traits.words if self.offered is None else self.offered(traits)

    def may_have(self, call: Call, engine: EngineKind) -> bool:
        """Whether a call in an engine may have another value than the default."""
        return call.kind in self.calls and self.is_offered(engine)

    def faster(self, call: Call, placement: Placement, graph: DataflowGraph) -> list[T]:
        """Return the values that take less time but more memory than the placement's own, the fastest first."""
        values, now = list(self.values(call, placement, graph)), self.of(placement)
        return values[: values.index(now)] if now in values else values[:-1]

    def mistakes(self, call: Call, placement: Placement, graph: DataflowGraph) -> Iterator[InvalidInput]:
        """Yield everything wrong with a placement's value, if it is not the default."""
        if call.kind not in self.calls:
            yield NotUsed(
                field_of(call, self.name), self.of(placement), f"a call of kind {call.kind} {self.other_calls}"
            )
        elif not self.is_offered(placement.engine):
            yield NotUsed(field_of(call, self.name), self.of(placement), self.other_engines(placement.engine))
        else:
            yield from self.wrong(call, placement, graph)


def field_of(call: Call, word: str) -> str:
    """Return the name of a word in an error about a plan."""
    return f"plan.calls.{call.name}.{word}"


def shown(value: object) -> str:
    """Format a value as in a plan file.

    >>> shown(True), shown(2.0), shown("all")
    ('true', '2', 'all')
    """
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
