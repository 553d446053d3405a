"""The dataflow graph of an iteration: model function calls and the data that flows between them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from pydantic import Field

from prefect_rlhf.errors.errors import GraphError
from prefect_rlhf.placement.devices.hashed_once import HashedOnce, hashed_once
from prefect_rlhf.placement.models.model import ModelSpec
from prefect_rlhf.placement.models.weights import Weights, named_weights
from prefect_rlhf.placement.row_set import RowCount, RowLimit, RowSet

CallKind = Literal["generate", "inference", "train_step", "compute"]
MeanOver = Literal["tokens", "rows", "groups"] | float
"""How a loss is averaged; a number takes the place of every row's length."""


@dataclass(frozen=True, slots=True)
class Operation:
    """A call's work by name, so that a graph survives JSON and moved files.

    Other processes import the modules of name and settings. Fields after the settings are neither saved nor compared.
    """

    name: str
    """A registered name (a loss, an advantage estimator), or a plain word that an engine knows (`logprobs`, `values`,
    `scores`, `sample`)."""
    settings: str = "{}"
    """As JSON."""
    module: Annotated[str, Field(exclude=True)] = field(default="", compare=False)
    """Registers the name."""
    settings_type: Annotated[str, Field(exclude=True)] = field(default="", compare=False)
    """The `module:class` of the settings."""
    file: Annotated[str, Field(exclude=True)] = field(default="", compare=False)
    """The file of `module`, wherever it lies."""
    settings_file: Annotated[str, Field(exclude=True)] = field(default="", compare=False)
    """The file of the settings' module."""
    parameter: Annotated[str, Field(exclude=True)] = field(default="", compare=False)
    """The parameter with the settings, such as algo.sampling; empty for settings that the body makes."""


@dataclass(frozen=True, slots=True)
class Port:
    """An input of a call.

    Either a row of the source belongs to several rows of the call, which were made from it. Or a row of the call has
    several rows of the source, which were made from it and are read together.
    """

    argument: str
    """The parameter that gets the keys."""
    source: str
    """The call or dataset that produced them."""
    keys: tuple[str, ...]
    rows_each: int = 1
    """Rows of the call for each row of the source."""
    children: int = 1
    """Rows of the source for each row of the call."""

    def source_rows(self, rows: Iterable[int]) -> list[int]:
        """Return, for each of the call's `rows`, the source row that it was made from, or its children, in order.

        >>> Port("a", "a", (), rows_each=2).source_rows((2, 3)), Port("a", "a", (), children=2).source_rows((2, 3))
        ([1, 1], [4, 5, 6, 7])
        """
        if self.children > 1:
            return [child for row in rows for child in range(row * self.children, (row + 1) * self.children)]
        return [row // self.rows_each for row in rows]


@dataclass(frozen=True, slots=True)
class Dataset:
    """A source of items: prompts (a row each) or preference pairs (two rows each)."""

    name: str
    keys: tuple[str, ...]
    num_items: int
    """Its size."""
    rows_per_item: int = 1
    read_as: str = field(default="", repr=False)
    """Which columns and rows are read, and how, so that a resumed run reads the same data."""
    columns: tuple[str, ...] = ()
    """Further keys, with plain values."""


@dataclass(frozen=True, slots=True)
class PlayBounds:
    """A generate's play: its limits, and the planner's expectations."""

    settings: str
    """As JSON."""
    max_tokens: int
    """Limit on a row's tokens after its prompt."""
    max_turns: int
    """Limit on the model's turns in a row."""
    turns: float
    """Expected turns of a row."""
    observed: float
    """Expected tokens in all answers of the environment."""
    seconds: float
    """Expected wait for each answer."""

    @property
    def wait_seconds(self) -> float:
        """How many seconds a row is expected to wait for answers; the last turn has no answer."""
        return (self.turns - 1) * self.seconds


@dataclass(frozen=True, slots=True)
class Term:
    """A loss of a train_step on its own rows; the step's loss is the sum of `weight` times the mean of each term.

    What is not described here is as in a Call.
    """

    name: str
    """Tells it from the step's other terms."""
    operation: Operation
    """The loss."""
    outputs: tuple[str, ...]
    """What it needs from the model."""
    inputs: tuple[Port, ...]
    rows: RowSet
    num_rows: int
    rows_per_item: int = 1
    weight: float = 1.0
    mean_over: MeanOver = "tokens"
    temperature: float = 1.0


@hashed_once
@dataclass(frozen=True, slots=True)
class Call(HashedOnce):
    """A model function call, or a pure computation on data."""

    name: str
    kind: CallKind
    role: str | None
    """The model; None for compute."""
    inputs: tuple[Port, ...]
    """A train_step's are the inputs of all its terms."""
    outputs: tuple[str, ...]
    """The keys that it adds to `rows`."""
    operation: Operation
    rows: RowSet
    """The rows that it works on; a generate works on the rows that it makes, a train_step on the rows of its first
    term."""
    num_rows: int
    """The number of `rows` in a step."""
    every: int | None = None
    """Makes it an evaluation call: it runs before training (step 0), after steps every, 2 * every, ..., and after the
    last."""
    stateful: bool = False
    """Whether a computation carries state from step to step."""
    rows_per_item: int = 1
    """Groups of this many adjacent rows (a chosen and a rejected answer) are never split."""
    mini_batches: int = 1
    epochs: int = 1
    """A train_step takes `epochs` * `mini_batches` optimizer steps on its `terms`."""
    temperature: float = 1.0
    """Divides the logits of the log-probabilities that the call makes."""
    max_new_tokens: int = 0
    """The most tokens that a generate adds to a row; 0 means not stated."""
    host_seconds: float | None = None
    """The expected time of a compute that works in worker processes on the node's CPUs."""
    terms: tuple[Term, ...] = ()
    chooses: RowSet | None = None
    """The rows that a select keeps."""
    row_limit: RowLimit | None = None
    """How long the rows may be that a computation makes."""
    draws: str = ""
    """The name of the stream of a generate's random numbers, which calls may share."""
    play: PlayBounds | None = None
    """Set if a generate works in turns."""

    def setting(self, field_name: str) -> str:
        """Return a setting's name as you would state it, with the parameter that contains the call's settings.

        >>> rows = RowSet("prompts", "prompts")
        >>> sample = Operation("sample", parameter="algo.first")
        >>> Call("turn", "generate", "actor", (), (), sample, rows, 8).setting("stop")
        'algo.first.stop'
        """
        parameter = self.operation.parameter
        return f"{parameter}.{field_name}" if parameter else f"{field_name} of {self.name}"

    @property
    def row_count(self) -> RowCount:
        """How many rows it works on: equal in every step, unless a select keeps some of them."""
        return self.rows.choice.count if self.rows.choice else RowCount(self.num_rows, self.num_rows)

    @property
    def span(self) -> int:
        """Row numbers are from 0 to below this limit, which exceeds the number of rows if a select keeps some of
        them.
        """
        return self.rows.choice.num_rows if self.rows.choice else self.num_rows

    @property
    def waits_for_choices(self) -> tuple[str, ...]:
        """The calls that select the rows it works on, in any of its row sets."""
        row_sets = dict.fromkeys((self.rows, *(term.rows for term in self.terms)))
        return tuple(dict.fromkeys(chosen.name for rows in row_sets for chosen in rows.choices))

    @property
    def num_items(self) -> int:
        """Groups of rows that are never split."""
        return self.num_rows // self.rows_per_item

    def most_items(self, dp: int) -> int:
        """Return how many items of the largest mini-batch the fullest of `dp` equally fast replicas has."""
        return -(-self.num_items // (self.mini_batches * dp))

    @property
    def by_row_set(self) -> tuple[Call, ...]:
        """The call on each of its row sets alone; a train_step has several row sets if its terms do."""
        row_sets = dict.fromkeys(term.rows for term in self.terms)
        if len(row_sets) < 2:
            return (self,)
        found = []
        for rows in row_sets:
            terms = tuple(term for term in self.terms if term.rows == rows)
            ports = tuple(dict.fromkeys(port for term in terms for port in term.inputs))
            width, count = math.lcm(*(term.rows_per_item for term in terms)), terms[0].num_rows
            found.append(replace(self, inputs=ports, rows=rows, num_rows=count, rows_per_item=width, terms=terms))
        return tuple(found)

    def cut(self, parts: int) -> Call:
        """Return the call on one of `parts` equal parts of its rows."""
        return self if parts == 1 else replace(self, num_rows=self.num_rows // parts)

    @property
    def on_hosts(self) -> bool:
        """Whether it runs in worker processes on the node's CPUs, concurrently with its device's work."""
        return self.host_seconds is not None


@dataclass(frozen=True, slots=True)
class VersionEdge:
    """`target` reads the weights (or state) of `role` that `source` wrote `lag` steps earlier."""

    source: str
    target: str
    role: str
    lag: int


@hashed_once
@dataclass(frozen=True, slots=True)
class DataflowGraph(HashedOnce):
    """One iteration of an algorithm. Calls are in a topological order of the data edges."""

    name: str
    models: tuple[ModelSpec, ...]
    datasets: tuple[Dataset, ...]
    calls: tuple[Call, ...]
    staleness: int = 0
    _by_name: dict[str, Call] = field(init=False, repr=False, compare=False, hash=False)
    _models: dict[str, ModelSpec] = field(init=False, repr=False, compare=False, hash=False)
    _trainers: dict[str, Call] = field(init=False, repr=False, compare=False, hash=False)
    _reads: dict[str, dict[str, tuple[str, ...]]] = field(init=False, repr=False, compare=False, hash=False)
    _weights: Mapping[str, tuple[Weights, ...]] = field(init=False, repr=False, compare=False, hash=False)

    def __post_init__(self) -> None:
        trainers = {call.role: call for call in self.calls if call.kind == "train_step"}
        object.__setattr__(self, "_by_name", {call.name: call for call in self.calls})
        object.__setattr__(self, "_models", {model.role: model for model in self.models})
        object.__setattr__(self, "_trainers", trainers)
        object.__setattr__(self, "_reads", {call.name: self._keys_by_producer(call) for call in self.calls})
        object.__setattr__(self, "_weights", self._named_weights())
        check_graph(self)

    def __iter__(self) -> Iterator[Call]:
        return iter(self.calls)

    def call(self, name: str) -> Call:
        return self._by_name[name]

    def model(self, role: str) -> ModelSpec:
        return self._models[role]

    def weights(self, role: str) -> tuple[Weights, ...]:
        """Return the weights of a role's model; another model may have the same frozen weights."""
        return self._weights[role]

    def all_weights(self) -> tuple[Weights, ...]:
        """Return the weights of all models, each once."""
        every = (own for model in self.models for own in self.weights(model.role))
        return tuple({own.name: own for own in every}.values())

    def trained_by(self, role: str) -> Call | None:
        """Return the call that writes `role`'s trained weights, or None if the role is frozen."""
        return self._trainers.get(role)

    def version_after(self, role: str, step: int) -> int:
        """Return the version of a trained role's or a follower's weights after `step` steps."""
        follows = self.model(role).follows
        return step if follows is None else follows.version(step)

    def follow_lag(self, call: Call) -> int:
        """Return how many steps back from its own step a follower's call reads the newest version.

        As in `version_edges`, with the follow in place of the train_step.
        """
        follows = self.model(call.role or "").follows
        assert follows is not None  # only asked of followers
        names = [each.name for each in self.calls]
        is_later = call.every is not None or names.index(call.name) > names.index(follows.after)
        return 0 if is_later else 1 + self.staleness

    def generated_by(self, call: Call) -> Call | None:
        """Return the generate that made a call's rows, perhaps through other calls; None for rows of a dataset."""
        if call.kind == "generate":
            return call
        own_first = sorted(call.inputs, key=lambda port: port.children)
        sources = (self.generated_by(self.call(port.source)) for port in own_first if port.source in self._by_name)
        return next((source for source in sources if source), None)

    def makes_prompts_of(self, rows: RowSet) -> bool:
        """Whether a call made the prompts of these rows; otherwise they are the dataset's."""
        made = rows.numbered
        if made.parent is None:
            return False
        return self.call(made.name).kind != "generate" or made.parent.numbered.parent is not None

    def reads_of(self, consumer: str) -> Mapping[str, tuple[str, ...]]:
        """Return the calls that `consumer` reads rows from, each with all keys that it reads, over all ports.

        From a selecting call it reads no keys, only the row numbers.
        """
        return self._reads[consumer]

    def keys_read(self, part: Call) -> dict[str, tuple[str, ...]]:
        """Return the calls that `part`, a call on a single row set, reads rows from, each with all keys that it
        reads.
        """
        return dict(self.reads_of(part.name)) if part == self.call(part.name) else self._keys_by_producer(part)

    def version_edges(self) -> tuple[VersionEdge, ...]:
        """Return, for each reader of a trained role, the train_step that it waits for and how many steps earlier this
        ran.

        A call written after its role's train_step reads the version of the same step (lag 0). A call written before it
        reads the version of the train_step `1 + staleness` steps earlier. The train_step itself uses the newest version
        at the step's start (lag 1). Evaluation calls, wherever they are written, use the version of the step's end (lag
        0). A stateful computation follows its own previous run in the same way.
        """
        position = {call.name: index for index, call in enumerate(self.calls)}
        edges = []
        for call in self.calls:
            if call.stateful:
                edges.append(VersionEdge(call.name, call.name, call.name, 1))
            trainer = self.trained_by(call.role) if call.role else None
            if trainer is None:
                continue
            after_trainer = call.every is not None or position[call.name] > position[trainer.name]
            lag = 1 if call == trainer else 0 if after_trainer else 1 + self.staleness
            edges.append(VersionEdge(trainer.name, call.name, trainer.role or "", lag))
        return tuple(edges)

    def _named_weights(self) -> Mapping[str, tuple[Weights, ...]]:
        try:
            written = {model.role for model in self.models if model.role in self._trainers or model.follows}
            return named_weights(self.models, frozenset(written))
        except GraphError as error:
            raise GraphError(f"flow {self.name}: {error}") from error

    def _keys_by_producer(self, consumer: Call) -> dict[str, tuple[str, ...]]:
        keys: dict[str, tuple[str, ...]] = {}
        for port in consumer.inputs:
            if port.source in self._by_name:
                keys[port.source] = tuple(dict.fromkeys((*keys.get(port.source, ()), *port.keys)))
        return {**dict.fromkeys(consumer.waits_for_choices, ()), **keys}


def check_graph(graph: DataflowGraph) -> None:
    """Raise GraphError for calls that no order of task runs could satisfy."""
    names: set[str] = set()
    trainers: dict[str | None, str] = {}
    for call in graph:
        if call.name in names:
            raise GraphError(f"flow {graph.name}: two calls are named {call.name!r}; give the second call a name=...")
        names.add(call.name)
        if call.kind == "train_step":
            first = trainers.setdefault(call.role, call.name)
            if first != call.name:
                both = f"{first} and {call.name} both train the weights of {call.role}"
                raise GraphError(f"flow {graph.name}: {both}; weights belong to a single train_step")
    if graph.staleness < 0:
        raise GraphError(f"flow {graph.name}: staleness is {graph.staleness}; it counts steps, so 0 or more")
    earlier: dict[str, Call] = {}
    for call in graph:
        _check_call(graph, call)
        _check_choices(graph, call, earlier)
        for part in call.by_row_set:
            for port in part.inputs:
                _check_port(graph, part, port, earlier)
        earlier[call.name] = call


def _check_call(graph: DataflowGraph, call: Call) -> None:
    where = f"flow {graph.name}: call {call.name}"
    if (call.role is None) != (call.kind == "compute"):
        raise GraphError(
            f"{where} ({call.kind}) has role {call.role!r}; a model's call has a role, a compute has no role"
        )
    if call.role is not None and all(model.role != call.role for model in graph.models):
        raise GraphError(f"{where} uses role {call.role!r}, which no model has")
    if call.every is not None and (call.every < 1 or call.kind == "train_step"):
        raise GraphError(f"{where} runs every {call.every} steps; that is for evaluation, with 1 step or more")
    if call.stateful and call.kind != "compute":
        raise GraphError(f"{where} is stateful; only a compute carries state from step to step")
    if call.on_hosts and call.kind != "compute":
        raise GraphError(f"{where} has host_seconds; only a compute runs on hosts")
    if call.play is not None and (call.kind != "generate" or call.play.max_tokens != call.max_new_tokens):
        raise GraphError(
            f"{where} has a play; only a generate may have a play, whose max_tokens equals its max_new_tokens"
        )
    if min(call.num_rows, call.mini_batches, call.rows_per_item) < 1:
        raise GraphError(
            f"{where} has {call.num_rows} rows in {call.mini_batches} mini-batches of items of {call.rows_per_item}; "
            "each must be at least 1"
        )


def _check_choices(graph: DataflowGraph, call: Call, earlier: Mapping[str, Call]) -> None:
    where = f"flow {graph.name}: call {call.name}"
    if call.chooses is not None and (call.kind != "compute" or call.chooses.parent != call.rows):
        raise GraphError(f"{where} chooses rows; only a compute may, among its own rows")
    for name in call.waits_for_choices:
        if name not in earlier or earlier[name].chooses is None:
            raise GraphError(
                f"{where} works on rows that {name!r} chooses, but no earlier call of that name chooses rows"
            )


def _check_port(graph: DataflowGraph, call: Call, port: Port, earlier: dict[str, Call]) -> None:
    where = f"flow {graph.name}: input {port.argument} of call {call.name}"
    dataset = next((dataset for dataset in graph.datasets if dataset.name == port.source), None)
    producer = earlier.get(port.source)
    if dataset is None and producer is None:
        raise GraphError(f"{where} comes from {port.source!r}, which is neither a dataset nor an earlier call")
    if producer is None:
        return
    missing = [key for key in port.keys if key not in producer.outputs]
    if missing:
        raise GraphError(f"{where} needs {missing[0]!r} of {producer.name}, which makes {', '.join(producer.outputs)}")
    if producer.every != call.every:
        raise GraphError(
            f"{where} comes from {producer.name}, which runs {_when(producer)}, but {call.name} runs {_when(call)}"
        )
    if port.children > 1:
        _check_children(where, call, port, producer)
        return
    if not call.rows.may_read(producer.rows):
        raise GraphError(
            f"{where} comes from {producer.name}, which has rows of {producer.rows.name}; {call.name} works on "
            f"rows of {call.rows.name}, which are neither the same nor made from them"
        )
    if call.span != producer.span * port.rows_each or port.rows_each != call.rows.per_row(producer.rows):
        raise GraphError(
            f"{where} comes from {producer.name} with {producer.span} rows a step, but {call.name} works on "
            f"{call.span}, {port.rows_each} of each"
        )


def _check_children(where: str, call: Call, port: Port, producer: Call) -> None:
    is_made = producer.rows.may_read(call.rows) and not producer.rows.choices
    if call.kind != "compute" or not is_made or port.children != call.rows.children(producer.rows):
        raise GraphError(
            f"{where} comes from {producer.name} with {port.children} rows for each of {call.rows.name}; only a "
            "compute may read rows made from its own, and it reads all of them"
        )


def _when(call: Call) -> str:
    return "in every step" if call.every is None else f"every {call.every} steps"
