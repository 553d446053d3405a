"""Losses and computations as values: a registered name and its settings, so that a graph can be saved and sent.

`@loss` and `@computation` turn a plain function into an Operator, which is registered under the function's name;
calling an Operator with settings binds it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, NoReturn, ParamSpec, TypeVar, get_args

from prefect_rlhf.engines.compute import Computed
from prefect_rlhf.engines.loss import LossValues, Output
from prefect_rlhf.engines.registry import Registry
from prefect_rlhf.engines.rows import Batch, Columns, NoSuchColumn
from prefect_rlhf.placement.blame import own_place
from prefect_rlhf.placement.errors import GraphError, InvalidInput
from prefect_rlhf.placement.graph import MeanOver, Operation
from prefect_rlhf.placement.modules import import_from, importable
from prefect_rlhf.placement.row_set import RowLimit
from prefect_rlhf.tasks.settings import Settings
from prefect_rlhf.tasks.terms import LossOn, Terms

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


NONE = Settings()  # of an operator that has none
ROW_KEYS = frozenset({"tokens", "prompt_tokens"})
"""A computation of either makes new rows."""

OFFERED = ("context", "state")  # what a computation is given beside rows and settings, where it names it


@dataclass(frozen=True)
class Operator(Generic[Arguments, Result]):
    """A module-level function that a graph may name.

    `function` is the plain function, for tests and other functions; calling with settings is what a flow body does.
    """

    name: str
    function: Callable[Arguments, Result]
    kind: Literal["loss", "computation"]
    outputs: tuple[str, ...] = ()  # keys that a computation makes; of the model, what a loss asks for
    rows_per_item: int = 1
    stateful: bool = False

    def __call__(self, settings: Settings = NONE) -> Bound:
        """Bind settings; a loss is then put `.on(rows)`."""
        return Bound(operation(self.name, settings, self.function.__module__))

    def on(self, *_: object, **__: object) -> NoReturn:
        """Raise GraphError: settings come first."""
        raise GraphError(f"{self.kind} {self.name} has no settings yet: write {self.name}(algo).on(...)")

    @property
    def place(self) -> str:
        """The file and line of the function."""
        code = getattr(inspect.unwrap(self.function), "__code__", None)
        return f"{code.co_filename}:{code.co_firstlineno}" if code else self.function.__module__

    def check_arguments(self, flow: str, num_inputs: int) -> None:
        """Raise GraphError, which names the flow, unless the function takes so many inputs and `settings`."""
        signature = inspect.signature(self.function)
        offered = {name: None for name in OFFERED if self.kind == "computation" and name in signature.parameters}
        try:
            signature.bind(*[None] * num_inputs, settings=None, **offered)
        except TypeError as error:
            given = f"{num_inputs} inputs" if self.kind == "computation" else f"{', '.join(self.outputs)}, batch"
            wanted = ", ".join(name for name in signature.parameters)
            said = f"{self.name}({wanted}) is given {given} and settings: {error}"
            raise GraphError(f"flow {flow}: {said} ({self.place})") from None


OPERATORS: Registry[Operator[..., Any]] = Registry("loss or computation")


def operation(name: str, settings: Settings, module: str = "") -> Operation:
    """Return what a call runs; `module` registers the name, unless that is a word of the engines."""
    kind = type(settings)
    module, file = importable(module)
    settings_module, settings_file = importable(kind.__module__)
    settings_type = f"{settings_module}:{kind.__name__}"
    return Operation(name, settings.model_dump_json(), module, settings_type, file, settings_file)


@dataclass(frozen=True, slots=True)
class Bound:
    """An Operator with its settings, as strings; resolved where it runs."""

    operation: Operation
    row_limit: RowLimit | None = None  # of a computation that makes rows

    @property
    def operator(self) -> Operator[..., Any]:
        return OPERATORS.find(self.operation.name, self.operation.module, self.operation.file)

    @property
    def place(self) -> str:
        """The file and line of the function."""
        return self.operator.place

    @property
    def settings(self) -> Settings:
        module, _, name = self.operation.settings_type.partition(":")
        kind: type[Settings] = getattr(import_from(module, self.operation.settings_file), name)
        return kind.model_validate_json(self.operation.settings)

    def on(
        self,
        *rows: object,
        mean_over: MeanOver | None = None,
        temperature: float = 1.0,
        batch_size: int | None = None,
        name: str = "",
    ) -> Terms:
        """Return a loss on rows: what train_step takes, alone or in a weighted sum.

        `mean_over` is what its values are a mean over: "tokens", "rows", "groups" (rows made of one row), or a number
        in place of every row's length; by default the settings' `mean_over`, where they have one, else tokens, or rows
        of a loss on scores or on items. `temperature` divides the logits, as it did when the rows were sampled;
        `batch_size` items enter a step where rows are a dataset. `name` is what metrics are known by, in a sum.
        """
        operator = self.operator
        if operator.kind != "loss":
            raise GraphError(f"{operator.name} is a {operator.kind}; a train_step has losses: functions with @loss")
        whole_rows = "scores" in operator.outputs or operator.rows_per_item > 1
        stated = getattr(self.settings, "mean_over", None) if mean_over is None else mean_over
        over = stated or ("rows" if whole_rows else "tokens")
        if over not in ("tokens", "rows", "groups") and (isinstance(over, str | bool) or not over > 0):
            expected = '"tokens", "rows", "groups" or a number above 0'
            raise GraphError(f"{operator.name}: got {over!r:.40} as mean_over, expected {expected}")
        return Terms((LossOn(name or operator.name, self.operation, rows, over, temperature, batch_size),))

    def __call__(self, *arguments: Any, **offered: Any) -> Any:
        """Run it: on outputs and batch a loss, on one Batch per input a computation.

        Of `offered` (context, state) the function gets what its signature names. Raises WrongOperator, which says where
        the function stands, unless it reads keys that are there and returns what its decorator says.
        """
        operator = self.operator
        parameters = inspect.signature(operator.function).parameters
        accepted = {name: value for name, value in offered.items() if name in parameters}
        if operator.kind == "loss":
            *outputs, batch = arguments
            arguments = *outputs, Columns(batch)
        try:
            result = operator.function(*arguments, settings=self.settings, **accepted)
        except NoSuchColumn as error:
            expected = (
                f"one of those that its inputs have: {', '.join(error.there)} ({own_place(error) or operator.place})"
            )
            raise WrongOperator(f"key that {operator.name} reads", error.key, expected) from error
        if operator.kind == "loss":
            check_type(result, LossValues, operator)
        else:
            check_type(result, Computed, operator)
            check_columns(result, arguments, operator)
            if self.row_limit is not None:
                check_row_lengths(result, arguments, self.row_limit, operator)
        return result

    def load(self) -> None:
        """Import function and settings where this is called. Raises what their files raise."""
        self.operator, self.settings  # noqa: B018  each is looked up as it is read


class WrongOperator(InvalidInput):
    """A loss or a computation does not do what its decorator and its inputs say."""


def check_type(result: object, expected: type, operator: Operator[..., Any]) -> None:
    """Raise WrongOperator unless a function returned what one of its kind does."""
    if not isinstance(result, expected):
        seen, right = type(result).__name__, f"{expected.__name__} ({operator.place})"
        raise WrongOperator(f"what {operator.name} returns", seen, right)


def check_columns(computed: Computed, inputs: Sequence[Batch], operator: Operator[..., Any]) -> None:
    """Raise WrongOperator unless a computation made the columns it names, each with a value or more for every row."""
    if set(computed.columns) != set(operator.outputs):
        named = ", ".join(operator.outputs) or "none"
        expected = f"those that its @computation names: {named} ({operator.place})"
        raise WrongOperator(f"keys that {operator.name} returns", ", ".join(computed.columns) or "none", expected)
    num_rows = next((len(column) for batch in inputs for column in batch.columns.values()), None)
    for key, column in computed.columns.items():
        if num_rows is not None and len(column) != num_rows:
            expected = f"{num_rows}, as its inputs have ({operator.place})"
            raise WrongOperator(f"rows of {key!r} that {operator.name} returns", len(column), expected)


def check_row_lengths(
    computed: Computed, inputs: Sequence[Batch], limit: RowLimit, operator: Operator[..., Any]
) -> None:
    """Raise WrongOperator for a row with more tokens than the call states: memory is planned for so many."""
    longest_input = max((_longest(batch.columns) for batch in inputs), default=0)
    most, longest = limit.of(longest_input), _longest(computed.columns)
    if longest > most:
        stated = "as the call states"
        if limit.longest is None:
            stated = f"the {longest_input} of the longest row of its inputs and max_new_tokens={limit.max_new_tokens}"
        expected = f"at most {most}, {stated} ({operator.place})"
        raise WrongOperator(f"tokens of a row that {operator.name} makes", longest, expected)


def _longest(columns: Mapping[str, Any]) -> int:
    return max((len(row) for key in ROW_KEYS & columns.keys() for row in columns[key]), default=0)


def loss(
    *outputs: Output, rows_per_item: int = 1, name: str = ""
) -> Callable[[Callable[Arguments, Result]], Operator[Arguments, Result]]:
    """Mark `f(*outputs, batch, settings) -> LossValues` as a loss on what one forward pass of the model gives.

    `outputs` are one or more of logprobs, values, scores and entropy, each an argument in that order. `rows_per_item`
    adjacent rows stay in one micro-batch (2 for a chosen and a rejected answer). `name` is what graphs and checkpoints
    know it by; empty: the function's own. Raises GraphError for a name that another definition has, and for an output
    that there is not.
    """
    for output in outputs or ("none",):
        if output not in get_args(Output):
            raise GraphError(f"@loss: got output {output!r:.40}, expected one or more of {', '.join(get_args(Output))}")

    def register(function: Callable[Arguments, Result]) -> Operator[Arguments, Result]:
        operator = Operator(name or function.__name__, function, "loss", outputs, rows_per_item)
        OPERATORS.add(operator.name, function, operator)
        return operator

    return register


def computation(
    *outputs: str, stateful: bool = False, name: str = ""
) -> Callable[[Callable[Arguments, Result]], Operator[Arguments, Result]]:
    """Mark `f(*batches, settings, [context], [state]) -> Computed` as a computation that adds the keys `outputs`.

    It sees all rows of the step at once. With `stateful`, `state` is what it returned a step earlier (None at first).
    `name` is as for a loss.
    """

    def register(function: Callable[Arguments, Result]) -> Operator[Arguments, Result]:
        operator = Operator(name or function.__name__, function, "computation", outputs=outputs, stateful=stateful)
        OPERATORS.add(operator.name, function, operator)
        return operator

    return register
