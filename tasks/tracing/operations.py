"""Losses and computations as values: a registered name and its settings, so that a graph can be saved and sent.

`@loss` and `@computation` turn a plain function into an Operator, which is registered under the function's name;
calling an Operator with settings binds it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, NoReturn, ParamSpec, TypeVar

from prefect_rlhf.engines.compute import Computed
from prefect_rlhf.engines.functions.scores import MOST_SCORE, SCORES
from prefect_rlhf.engines.losses.protocol import LossValues
from prefect_rlhf.engines.registry import Registry
from prefect_rlhf.engines.rows import Batch, Columns, NoSuchColumn
from prefect_rlhf.errors.blame import own_place
from prefect_rlhf.errors.errors import GraphError, InvalidInput
from prefect_rlhf.files.modules import import_from, importable
from prefect_rlhf.placement.graph import MeanOver, Operation
from prefect_rlhf.placement.models.outputs import OUTPUTS
from prefect_rlhf.placement.row_set import RowLimit
from prefect_rlhf.tasks.settings import Settings
from prefect_rlhf.tasks.tracing.arguments import check_temperature
from prefect_rlhf.tasks.tracing.terms import LossOn, Terms

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


NONE = Settings()  # for an operator without settings
ROW_KEYS = frozenset({"tokens", "prompt_tokens"})
"""A computation with either key makes new rows."""

OFFERED = ("context", "state")  # arguments that a computation may name in addition to rows and settings


@dataclass(frozen=True)
class Operator(Generic[Arguments, Result]):
    """A module-level function that a graph may name.

    `function` is the plain function, for tests and other functions. A flow body calls the operator with settings.
    """

    name: str
    function: Callable[Arguments, Result]
    kind: Literal["loss", "computation"]
    outputs: tuple[str, ...] = ()  # keys that a computation makes, or outputs of the model that a loss needs
    rows_per_item: int = 1
    stateful: bool = False

    def __call__(self, settings: Settings = NONE, /, *more: object, **named: object) -> Bound:
        """Bind settings; `.on(rows)` then applies a loss to rows. Raises GraphError for rows in place of settings."""
        if more or named or not isinstance(settings, Settings):
            right = "{0}(algo).on(rows)" if self.kind == "loss" else "compute({0}, rows, settings=algo)"
            written = right.format(self.name)
            raise GraphError(f"{self.kind} {self.name} is called with other values than settings: write {written}")
        return Bound(operation(self.name, settings, self.function.__module__))

    def on(self, *_: object, **__: object) -> NoReturn:
        """Raise GraphError: settings come first."""
        raise GraphError(f"{self.kind} {self.name} has no settings yet: write {self.name}(algo).on(...)")

    @property
    def place(self) -> str:
        """The function's file and line."""
        code = getattr(inspect.unwrap(self.function), "__code__", None)
        return f"{code.co_filename}:{code.co_firstlineno}" if code else self.function.__module__

    def check_arguments(self, flow: str, num_inputs: int) -> None:
        """Raise GraphError, with the flow's name, unless the function takes `num_inputs` inputs and `settings`."""
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


def operation(name: str, settings: Settings, module: str = "", parameter: str = "") -> Operation:
    """Return a call's operation.

    `module` is the module that registers the name, empty for a name of the engines. `parameter` states the settings.
    """
    kind = type(settings)
    module, file = importable(module)
    settings_module, settings_file = importable(kind.__module__)
    settings_type = f"{settings_module}:{kind.__name__}"
    return Operation(name, settings.model_dump_json(), module, settings_type, file, settings_file, parameter)


@dataclass(frozen=True, slots=True)
class Bound:
    """An Operator with its settings, as strings that are resolved in the process that runs it."""

    operation: Operation
    row_limit: RowLimit | None = None  # for a computation that makes rows

    @property
    def operator(self) -> Operator[..., Any]:
        return OPERATORS.find(self.operation.name, self.operation.module, self.operation.file)

    @property
    def place(self) -> str:
        """The function's file and line."""
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
        """Give the loss its rows, for a train_step.

        `mean_over` says how its values are averaged: over "tokens", "rows" or "groups" (rows made from the same row),
        or with a number in place of every row's length. By default the settings' own `mean_over` decides; without such
        a field, a loss on scores or on items averages over rows, and any other loss over tokens. `temperature` divides
        the logits, as it did when the rows were sampled. From a dataset, each step takes `batch_size` items. In a sum
        of losses, `name` distinguishes this loss's metrics.
        """
        operator = self.operator
        if operator.kind != "loss":
            raise GraphError(f"{operator.name} is a {operator.kind}; a train_step has losses: functions with @loss")
        of_rows = any(name in OUTPUTS and OUTPUTS[name].per == "row" for name in operator.outputs)
        whole_rows = of_rows or operator.rows_per_item > 1
        stated = getattr(self.settings, "mean_over", None) if mean_over is None else mean_over
        over = stated or ("rows" if whole_rows else "tokens")
        of_number = isinstance(over, int | float) and not isinstance(over, bool) and 0 < over < math.inf
        if over not in ("tokens", "rows", "groups") and not of_number:
            expected = '"tokens", "rows", "groups" or a number above 0'
            raise GraphError(f"{operator.name}: got {over!r:.40} as mean_over, expected {expected}")
        check_temperature(operator.name, temperature, operator.outputs)
        return Terms((LossOn(name or operator.name, self.operation, rows, over, temperature, batch_size),))

    def __call__(self, *arguments: Any, **offered: Any) -> Any:
        """Run the function: a loss on outputs and batch, a computation on a Batch per input.

        The function receives those arguments of `offered` (context, state) that its signature names. Raises
        WrongOperator, with the function's file and line, unless it reads existing keys and returns the declared result.
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
            expected = f"a key of its inputs: {', '.join(error.there)} ({own_place(error) or operator.place})"
            raise WrongOperator(f"key that {operator.name} reads", error.key, expected) from error
        if operator.kind == "loss":
            check_type(result, LossValues, operator)
            check_values(result, operator)
        else:
            check_type(result, Computed, operator)
            check_columns(result, arguments, operator)
            check_scores(result, operator)
            result = replace(result, metrics=plain_metrics(result.metrics, operator))
            if self.row_limit is not None:
                check_row_lengths(result, arguments, self.row_limit, operator)
        return result

    def load(self) -> None:
        """Import function and settings in this process. Raises the errors of their files."""
        self.operator, self.settings  # noqa: B018  each is looked up as it is read


class WrongOperator(InvalidInput):
    """A loss or computation contradicts its decorator or its inputs."""


def check_type(result: object, expected: type, operator: Operator[..., Any]) -> None:
    """Raise WrongOperator unless the function returned its kind's type."""
    if not isinstance(result, expected):
        seen, right = type(result).__name__, f"{expected.__name__} ({operator.place})"
        raise WrongOperator(f"result of {operator.name}", seen, right)


def check_values(made: LossValues, operator: Operator[..., Any]) -> None:
    """Raise WrongOperator unless a loss's values and metrics are tensors."""
    from torch import Tensor  # only here: a flow is traced, and planned, without torch

    if not isinstance(made.metrics, Mapping):
        expected = f"a tensor for each name ({operator.place})"
        raise WrongOperator(f"metrics that {operator.name} returns", type(made.metrics).__name__, expected)
    named = {"values": made.values} | {f"metric {name!r}": values for name, values in made.metrics.items()}
    for name, values in named.items():
        if not isinstance(values, Tensor):
            expected = f"a tensor with a value for each token, row or item ({operator.place})"
            raise WrongOperator(f"{name} that {operator.name} returns", type(values).__name__, expected)


def check_columns(computed: Computed, inputs: Sequence[Batch], operator: Operator[..., Any]) -> None:
    """Raise WrongOperator unless a computation returned its declared columns, with at least one value for every row."""
    if not isinstance(computed.columns, Mapping):
        keys = ", ".join(f"{key!r}: ..." for key in operator.outputs)
        expected = f"a column for each of its keys: Computed({{{keys}}}) ({operator.place})"
        raise WrongOperator(f"columns that {operator.name} returns", type(computed.columns).__name__, expected)
    if set(computed.columns) != set(operator.outputs):
        named = ", ".join(operator.outputs) or "no keys"
        expected = f"the keys of its @computation: {named} ({operator.place})"
        raise WrongOperator(f"keys that {operator.name} returns", ", ".join(computed.columns) or "no keys", expected)
    num_rows = next((len(column) for batch in inputs for column in batch.columns.values()), None)
    for key, column in computed.columns.items():
        if (seen := _not_a_column(column)) is not None:
            expected = f"a tensor, [B] or [B, T], or a list with a tensor for each row ({operator.place})"
            raise WrongOperator(f"column {key!r} that {operator.name} returns", seen, expected)
        if num_rows is not None and len(column) != num_rows:
            expected = f"{num_rows}, as its inputs have ({operator.place})"
            raise WrongOperator(f"rows of {key!r} that {operator.name} returns", len(column), expected)


def _not_a_column(column: object) -> str | None:
    """Describe an object that is no column; None for a column."""
    from torch import Tensor  # only here: a flow is traced, and planned, without torch

    if isinstance(column, Tensor):
        return None if column.dim() else "a tensor of 0 dimensions"
    if not isinstance(column, list | tuple):
        return type(column).__name__
    other = next((row for row in column if not isinstance(row, Tensor)), None)
    return None if other is None else f"{type(column).__name__} of {type(other).__name__}"


def plain_metrics(metrics: Mapping[str, Any], operator: Operator[..., Any]) -> dict[str, float]:
    """Return metrics as plain numbers, as files and trackers take them. Raises WrongOperator for any other value.

    A tensor or an array with a single number is a number.
    """
    if not isinstance(metrics, Mapping):
        expected = f'numbers by their names: {{"score": 0.5}} ({operator.place})'
        raise WrongOperator(f"metrics that {operator.name} returns", type(metrics).__name__, expected)
    plain = {}
    for name, value in metrics.items():
        try:
            plain[name] = float("a text" if isinstance(value, str) else value)
        except (TypeError, ValueError, RuntimeError):
            seen = value if value is None or isinstance(value, str) else type(value).__name__
            expected = f"a single number, such as a mean ({operator.place})"
            raise WrongOperator(f"metric {name!r} that {operator.name} returns", seen, expected) from None
    return plain


def check_scores(computed: Computed, operator: Operator[..., Any]) -> None:
    """Raise WrongOperator for a score beyond the allowed range; a row without a score has NaN."""
    for row, score in enumerate(computed.columns.get("scores", ())):
        if score.numel() and float(score.double().abs().max()) > MOST_SCORE:
            expected = f"{SCORES}, or NaN for a row without a score ({operator.place})"
            raise WrongOperator(f"score of row {row} that {operator.name} returns", score.tolist(), expected)


def check_row_lengths(
    computed: Computed, inputs: Sequence[Batch], limit: RowLimit, operator: Operator[..., Any]
) -> None:
    """Raise WrongOperator for a row above the call's stated number of tokens, because memory is planned for that
    number.
    """
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
    *outputs: str, rows_per_item: int = 1, name: str = ""
) -> Callable[[Callable[Arguments, Result]], Operator[Arguments, Result]]:
    """Decorate `f(*outputs, batch, settings) -> LossValues`: you can then train on it.

    Name the model outputs that it needs: one or more of logprobs, values, scores and entropy. The function gets them as
    arguments in that order. `rows_per_item` adjacent rows stay in the same micro-batch (2 for a chosen and a rejected
    answer). Graphs and checkpoints call the loss by `name`, or else by the function's name. Raises GraphError for an
    unknown output, and for a name that another definition has.
    """
    _check_has_parentheses("loss", outputs, '@loss("logprobs")')
    for output in outputs or ("none",):
        if output not in (*OUTPUTS,):
            raise GraphError(f"@loss: got output {output!r:.40}, expected one or more of {', '.join(OUTPUTS)}")

    def register(function: Callable[Arguments, Result]) -> Operator[Arguments, Result]:
        operator = Operator(name or function.__name__, function, "loss", outputs, rows_per_item)
        OPERATORS.add(operator.name, function, operator)
        return operator

    return register


def computation(
    *outputs: str, stateful: bool = False, name: str = ""
) -> Callable[[Callable[Arguments, Result]], Operator[Arguments, Result]]:
    """Decorate `f(*batches, settings, [context], [state]) -> Computed`: you can then call it with `compute`.

    `outputs` are the keys that it adds. It receives all of a step's rows at once. With `stateful`, it also receives the
    `state` that it returned in the previous step (None at first). `name` works as for a loss. Raises GraphError for a
    key that is not text.
    """
    _check_has_parentheses("computation", outputs, '@computation("advantages")')

    def register(function: Callable[Arguments, Result]) -> Operator[Arguments, Result]:
        operator = Operator(name or function.__name__, function, "computation", outputs=outputs, stateful=stateful)
        OPERATORS.add(operator.name, function, operator)
        return operator

    return register


def _check_has_parentheses(kind: str, keys: Sequence[object], right: str) -> None:
    """Raise GraphError for a decorator that got its function in place of keys."""
    for key in keys:
        if not isinstance(key, str):
            seen = key.__name__ if inspect.isfunction(key) else repr(key)
            raise GraphError(f"@{kind}: got {seen:.60}, expected the names of its keys: {right}")
