"""Tracing: run a flow function's body once with handles for data, and record its calls as a graph."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, Protocol

from prefect_rlhf.errors.blame import described, own_place
from prefect_rlhf.errors.by_hand import WrongCall
from prefect_rlhf.errors.errors import GraphError, InvalidInput, RlhfError
from prefect_rlhf.files.path_text import from_here
from prefect_rlhf.placement.graph import Call, DataflowGraph, Dataset, Port
from prefect_rlhf.placement.models.model import FollowSpec, ModelSpec, OptimizerSpec
from prefect_rlhf.placement.row_set import RowSet
from prefect_rlhf.tasks.settings import Product, Settings
from prefect_rlhf.tasks.tracing.arguments import check_body, check_whole
from prefect_rlhf.tasks.tracing.followers import check_follows
from prefect_rlhf.tasks.tracing.heads import check_adapters, check_new_heads, check_no_idle_head, with_bases_formats

MAKERS = {
    "prompt_tokens": "a Prompts parameter, or a @computation of prompts,",
    "tokens": "a generate, a parameter of pairs, chats or rated answers, or a @computation of tokens",
    "group_tokens": "grpo_advantages, or a @computation for means over groups,",
    "group_rows": "grpo_advantages, or a @computation for means over groups,",
    "prompt_length": "a generate, a parameter of pairs, chats or rated answers, or a @computation of tokens",
}
"""The makers of the keys that the functions of a body need."""

_current: ContextVar[Trace] = ContextVar("rlhf_trace")  # the trace whose body is running


@dataclass(frozen=True, slots=True, eq=False)
class RowsHandle:
    """A call's result while tracing: keys that `source` will add to the `num_rows` rows of a row set."""

    source: str
    keys: tuple[str, ...]
    rows: RowSet
    num_rows: int
    rows_per_item: int = 1

    def port(self, reader: RowSet) -> Port:
        """Return the input for a call on `reader`'s rows, which read these rows, or from which these rows were made."""
        if (children := reader.children(self.rows)) > 1:
            return Port(self.source, self.source, self.keys, children=children)
        return Port(argument=self.source, source=self.source, keys=self.keys, rows_each=reader.per_row(self.rows))

    @property
    def expected_rows(self) -> int:
        """The expected number of rows; `num_rows` is the maximum."""
        return self.rows.choice.count.expected if self.rows.choice else self.num_rows

    def _refuse(self, *_: object, attribute: str = "") -> NoReturn:
        """Raise GraphError: rows do not exist yet, so a body cannot read them."""
        flow, what = current_trace(self.source).flow, f", and their {attribute!r}," if attribute else ""
        raise GraphError(
            f"flow {flow}: the rows of {self.source}{what} do not exist while the body is traced; read them in a "
            "@computation, which the body calls by compute(...), and choose among them by select(...): in place of a "
            "loop until there are enough, make more than enough and keep at_most"
        )

    def __getattr__(self, name: str) -> NoReturn:
        """Refuse what a tensor would have. Python and libraries ask for names with underscores."""
        if name.startswith("_"):
            raise AttributeError(name)
        self._refuse(attribute=name)

    @classmethod
    def __torch_function__(cls, *_: object) -> NoReturn:
        """Refuse functions of torch."""
        cls._refuse(RowsHandle("these calls", (), RowSet("", ""), 0))

    __getitem__ = __iter__ = __len__ = __bool__ = __contains__ = __float__ = __int__ = __neg__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __pow__ = __rpow__ = __matmul__ = __rmatmul__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = _refuse
    __and__ = __rand__ = __or__ = __ror__ = __invert__ = __abs__ = __round__ = __setitem__ = __index__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _refuse
    __hash__ = object.__hash__


@dataclass(slots=True)
class Trace:
    """The calls of a body so far. Roles and datasets are recognised by the objects that were passed to the body."""

    flow: str
    models: Mapping[str, ModelSpec]
    datasets: Mapping[str, Dataset]
    parameters: Mapping[int, str]  # id of an argument object -> the parameter's name
    calls: list[Call] = field(default_factory=list)
    optimizers: dict[str, OptimizerSpec] = field(default_factory=dict)
    follows: dict[str, FollowSpec] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    batches: dict[tuple[str, int, int | None], RowSet] = field(default_factory=dict)  # by dataset, size and `every`
    staleness: int | None = None  # None until a generate call sets it
    settings: Mapping[str, Settings] = field(default_factory=dict)  # the body's settings, by parameter name

    def settings_of(self, ending: str, value: object) -> str:
        """Return the settings with this value and a name that ends in `ending`; empty if no setting has the value."""
        numbers = [one for name, settings in self.settings.items() for one in _numbers(name, settings)]
        return " or ".join(name for name, set_value in numbers if name.endswith(ending) and set_value == value)

    def parameter_of(self, group: Settings) -> str:
        """Return the name of the parameter that is this settings group or equals it.

        A body may derive a group, for example greedy sampling for an evaluation; then the only parameter of its class
        is meant. Empty if several could be meant.
        """
        named = [one for name, given in self.settings.items() for one in _groups(name, given)]
        alike = [(name, given) for name, given in named if type(given) is type(group)]
        same = [name for name, given in alike if given is group] or [name for name, given in alike if given == group]
        return same[0] if same else alike[0][0] if len(alike) == 1 else ""

    def role(self, argument: object, call: str) -> str:
        """Return the role that `argument` represents. Raises GraphError unless it is a model parameter."""
        name = self.parameters.get(id(argument), "")
        if name not in self.models:
            needed = "a Model parameter of the flow itself, no copy"
            raise GraphError(f"flow {self.flow}: {call} needs {needed}, got {argument!r:.80}")
        self.used.add(name)
        return name

    def rows(self, argument: object, call: str, batch_size: int | None, every: int | None = None) -> RowsHandle:
        """Return the handle of `argument`: a call's rows, or `batch_size` items of a dataset parameter (None: all).

        Calls that take the same number of items of a dataset, equally often, work on the same rows.
        """
        if isinstance(argument, RowsHandle):
            if argument.source not in {*self.datasets, *(earlier.name for earlier in self.calls)}:
                raise GraphError(f"flow {self.flow}: {call} reads {argument.source!r}, which another flow made")
            return argument
        name = self.parameters.get(id(argument), "")
        if name not in self.datasets:
            raise GraphError(f"flow {self.flow}: {call} needs rows or a dataset parameter, got {argument!r:.80}")
        self.used.add(name)
        dataset = self.datasets[name]
        check_whole(f"flow {self.flow}: {call}", "batch_size", batch_size, "items in a step, None: all")
        check_whole(f"flow {self.flow}: {call}", "every", every, "steps between evaluations")
        size = dataset.num_items if batch_size is None else batch_size
        if not 1 <= size <= dataset.num_items:
            expected = f"1 to {dataset.num_items}, the items of {name}"
            if isinstance(size, Product):
                raise InvalidInput(" x ".join(f"algo.{factor}" for factor in size.factors), size.written, expected)
            raise InvalidInput(self.settings_of("batch_size", size) or f"batch_size of {call}", size, expected)
        batch = name, size, every
        if batch not in self.batches:
            steps = "" if every is None else f", every {every} steps"
            is_first = all(name != other for other, *_ in self.batches)
            label = name if is_first else f"{name} ({size} items{steps})"
            self.batches[batch] = RowSet(label, name, dataset.rows_per_item)
        return RowsHandle(name, dataset.keys, self.batches[batch], size * dataset.rows_per_item, dataset.rows_per_item)

    def common_rows(self, handles: Sequence[RowsHandle], call: str) -> RowsHandle:
        """Return the handle with the rows that a call on all handles works on; these rows can read all the others.

        Raises GraphError, naming two sources, if rows do not belong together.
        """
        for handle in handles:
            if all(handle.rows.may_read(other.rows) for other in handles):
                return handle
        first = handles[0]
        other = next(other for other in handles if not first.rows.may_read(other.rows))
        raise GraphError(
            f"flow {self.flow}: {call} reads {first.source} and {other.source}, whose rows do not belong together: "
            f"{origin_of(first.rows)}, and {origin_of(other.rows)}"
        )

    def require(self, keys: Sequence[str], handles: Sequence[RowsHandle], call: str) -> None:
        """Raise GraphError unless the handles together have these keys. The error names the calls that make a missing
        key.
        """
        there = [key for handle in handles for key in handle.keys]
        for key in keys:
            if key not in there:
                sources = " and ".join(handle.source for handle in handles)
                has = ", ".join(dict.fromkeys(there)) or "no keys"
                raise GraphError(
                    f"flow {self.flow}: {call} needs {key!r}, and {sources} has {has}; {MAKERS[key]} makes it"
                )

    def allow(self, staleness: int, call: str, every: int | None) -> None:
        """Let calls use weights that are `staleness` steps older. Raises GraphError if generate calls disagree."""
        if every is not None:
            if staleness:
                raise GraphError(
                    f"flow {self.flow}: {call} is evaluation, which uses the newest weights; remove staleness"
                )
            return
        if self.staleness not in (None, staleness):
            raise GraphError(
                f"flow {self.flow}: {call} has staleness {staleness}, an earlier generate {self.staleness}; "
                "they must all be equal"
            )
        self.staleness = staleness

    def add(self, call: Call) -> RowsHandle:
        """Append a call and return the handle of its outputs."""
        self.calls.append(call)
        return RowsHandle(call.name, call.outputs, call.rows, call.num_rows, call.rows_per_item)

    def graph(self) -> DataflowGraph:
        """Return the graph. Raises GraphError for an empty body and for unused parameters."""
        if not self.calls:
            raise GraphError(f"flow {self.flow}: the body made no model function call")
        models = tuple(self._model(role) for role in self.models)
        datasets = tuple(self.datasets.values())
        graph = DataflowGraph(self.flow, models, datasets, tuple(self.calls), self.staleness or 0)
        unused = sorted({*self.models, *self.datasets} - self.used)
        if unused:
            raise GraphError(f"flow {self.flow}: parameter {unused[0]!r} is used by no call; remove it")
        return graph

    def _model(self, role: str) -> ModelSpec:
        """Return a role's model as the body uses it; a follower of an adapted model has an adapter of its own."""
        model, follows = self.models[role], self.follows.get(role)
        adapter = model.adapter or (self.models[follows.leader].adapter if follows else None)
        return replace(model, optimizer=self.optimizers.get(role), adapter=adapter, follows=follows)


def _numbers(name: str, settings: Settings) -> Iterator[tuple[str, object]]:
    """Yield the dotted name and value of each setting, also of nested settings."""
    for field_name, value in settings:
        if isinstance(value, Settings):
            yield from _numbers(f"{name}.{field_name}", value)
        else:
            yield f"{name}.{field_name}", value


def _groups(name: str, settings: Settings) -> Iterator[tuple[str, Settings]]:
    """Yield the dotted name and value of a group of settings, and of the groups in it."""
    yield name, settings
    for field_name, value in settings:
        if isinstance(value, Settings):
            yield from _groups(f"{name}.{field_name}", value)


def check_not_chosen(trace: Trace, rows: RowSet, call: str) -> None:
    """Raise GraphError if a call would make new rows from rows that a select keeps."""
    if rows.choices:
        raise GraphError(
            f"flow {trace.flow}: {call} would make new rows from the rows that {rows.choices[0].name} keeps: make "
            "them from all rows first, then select"
        )


def origin_of(rows: RowSet) -> str:
    """Describe the origin of rows.

    >>> origin_of(RowSet("actor_generate", "prompts", 4, RowSet("prompts", "prompts")))
    'actor_generate has 4 for each of prompts'
    >>> origin_of(RowSet("pairs", "pairs", 2))
    'pairs is a batch of a dataset'
    """
    if rows.parent is None:
        return f"{rows.name} is a batch of a dataset"
    if rows.choice is not None:
        each = rows.choice.per_group or "any number"
        return f"{rows.name} keeps {each} of each group of {rows.parent.name}"
    return f"{rows.name} has {rows.samples} for each of {rows.parent.name}"


@contextmanager
def tracing(trace: Trace) -> Iterator[Trace]:
    """Make `trace` the current trace of generate, inference, compute and train_step."""
    token = _current.set(trace)
    try:
        yield trace
    finally:
        _current.reset(token)


def current_trace(call: str) -> Trace:
    """Return the trace in progress. Raises GraphError outside of a flow body."""
    trace = _current.get(None)
    if trace is None:
        raise GraphError(f"{call} was called outside of the body of an @rlhf_flow function")
    return trace


class Added(Protocol):
    """Calls that a run adds to any body, on a dataset of their own."""

    @property
    def data(self) -> object:
        """The argument that represents the dataset."""
        ...

    def trace(self, name: str, arguments: Mapping[str, Any]) -> None:
        """Add the calls to the trace in progress, after those of the body."""
        ...


EVALUATION = "evaluation"  # the parameter of every algorithm that adds calls, by the names of the sets


def data_name(name: str) -> str:
    """Return the dotted name of the parameter for a set's dataset.

    >>> data_name("math")
    'evaluation.math.data'
    """
    return f"{EVALUATION}.{name}.data"


def trace_body(
    flow: str,
    body: Callable[..., None],
    arguments: Mapping[str, Any],
    models: Mapping[str, ModelSpec],
    datasets: Mapping[str, Dataset],
    added: Mapping[str, Added] = MappingProxyType({}),
) -> DataflowGraph:
    """Run `body` once on `arguments`; those named in `models` and `datasets` represent roles and sources of rows.

    The `added` calls follow. Raises GraphError for any error of the body, with the file and the line.
    """
    objects = {**arguments, **{data_name(name): one.data for name, one in added.items()}}
    parameters = {id(objects[name]): name for name in (*models, *datasets)}
    if len(parameters) != len(models) + len(datasets):
        raise GraphError(f"flow {flow}: two parameters hold the same object; pass a copy to one of them")
    settings = {name: value for name, value in arguments.items() if isinstance(value, Settings)}
    with tracing(Trace(flow, models, datasets, parameters, settings=settings)) as trace:
        try:
            body(**arguments)
            for name, one in added.items():
                one.trace(name, arguments)
        except GraphError as error:
            place = own_place(error)
            if not place or place.partition(" in ")[0] in str(error):
                raise
            raise GraphError(f"{error} ({place})") from error
        except WrongCall as error:
            place = own_place(error)
            raise GraphError(f"flow {flow}: {error}" + (f" ({place})" if place else "")) from error
        except RlhfError:
            raise
        except (Exception, SystemExit) as error:
            raise GraphError(f"flow {flow}: its body raised {described(error)}") from error
    checked = check_adapters(check_new_heads(check_no_idle_head(check_follows(trace.graph()))))
    return with_bases_formats(checked)


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A flow's body. It is traced with the run's own arguments, because a setting may change the graph (PPO's
    old_logprobs).

    Raises GraphError for a body that cannot be traced: async, a generator, or with parameters without types.
    """

    name: str
    body: Callable[..., None]

    def __post_init__(self) -> None:
        check_body(self.name, self.body)

    @property
    def is_shipped(self) -> bool:
        """Whether this package ships the algorithm, and so tests it."""
        return self.body.__module__.partition(".")[0] == __name__.partition(".")[0]

    @property
    def word(self) -> str | None:
        """The word after `prefect-rlhf run` that finds the algorithm; None if no file defines it."""
        if self.is_shipped:
            return self.name
        file, function = Path(self.body.__code__.co_filename), self.body.__qualname__
        if not file.is_file() or not function.isidentifier():
            return None
        return f"{from_here(str(file))}:{function}"

    def trace(
        self, arguments: Mapping[str, Any], models: Mapping[str, ModelSpec], datasets: Mapping[str, Dataset]
    ) -> DataflowGraph:
        """Return an iteration's graph; `models` and `datasets` describe the parameters of these names.

        Evaluation on named sets is added to the body's calls.
        """
        own = {name: value for name, value in arguments.items() if name != EVALUATION}
        bound = inspect.signature(self.body).bind(**own)
        bound.apply_defaults()
        return trace_body(self.name, self.body, bound.arguments, models, datasets, arguments.get(EVALUATION, {}))
