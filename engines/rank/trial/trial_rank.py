"""A rank that makes up the models' results, and runs a graph's computations and losses on them.

Prompts and pairs are the dataset's own first rows. A response repeats tokens of its prompt, so that every token exists
in the tokenizer. Values are arbitrary but possible: log-probabilities are negative, scores and lengths differ.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast, final

import torch
from torch import Tensor

from prefect_rlhf.engines.commands import CallCommand, RankReport
from prefect_rlhf.engines.losses.mean_over import RowParts, row_parts
from prefect_rlhf.engines.rank.inputs import read_prompts, training_rows
from prefect_rlhf.engines.rank.rank import Rank
from prefect_rlhf.engines.rank.trial.mistake import DependsOnOtherRows, Mistake, is_mistake
from prefect_rlhf.engines.rows import pad
from prefect_rlhf.errors.blame import described
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.models.outputs import OUTPUTS

LONGEST = 3  # made-up response tokens, if the algorithm may sample that many


class Loadable(Protocol):
    """A function that is imported by name: `load` imports it in the calling process, `place` is its file and line."""

    def load(self) -> None: ...

    @property
    def place(self) -> str: ...


@dataclass(frozen=True, slots=True)
class TriedFunction:
    """A user's function; an error that no values can avoid becomes a Mistake."""

    function: Callable[..., Any]

    def __call__(self, *arguments: Any, **offered: Any) -> Any:
        """Call it. Raises Mistake, or the function's own error."""
        try:
            return self.function(*arguments, **offered)
        except Exception as error:
            if is_mistake(error):
                raise Mistake(described(error)) from error
            raise


@final
class TrialRank(Rank):
    """Runs the calls of a graph in order, as a rank does, but builds no model."""

    def load(self, functions: Mapping[str, Loadable]) -> dict[str, str]:
        """Import functions by the name of their call; return the error of each function that fails."""
        failures: dict[str, str] = {}
        for name, function in functions.items():
            try:
                function.load()
            except (Exception, SystemExit) as error:  # noqa: BLE001  a user's file may raise anything
                failures[name] = described(error)
        return failures

    def generate(self, command: CallCommand) -> RankReport:
        """Keep made-up responses to the prompts."""
        began = time.perf_counter()
        assert command.sampling is not None  # a generate command has it
        prompts = read_prompts(command, self.store, self._datasets)
        longest = min(LONGEST, command.sampling.max_new_tokens)
        lengths = [max(1, longest - row % 2) for row in range(len(prompts))]
        responses = [(list(prompt) * longest)[:length] for prompt, length in zip(prompts, lengths, strict=True)]
        tokens = [torch.tensor([*prompt, *more]) for prompt, more in zip(prompts, responses, strict=True)]
        self._keep(command, "tokens", tokens)
        self._keep(command, "prompt_length", [torch.tensor(len(prompt)) for prompt in prompts])
        self._keep(command, "logprobs", made_up("logprobs", lengths))
        self._keep(command, "truncated", [torch.tensor(0, dtype=torch.uint8) for _ in lengths])
        if command.play is not None:
            for key, rows in made_up_play(lengths).items():
                self._keep(command, key, rows)
        return self._report(began, command=command)

    def inference(self, command: CallCommand) -> RankReport:
        """Keep made-up values for the call's rows."""
        began, sequences = time.perf_counter(), self._inputs(command).sequences(command.doing)
        lengths = (sequences.lengths_B - sequences.prompt_lengths_B).tolist()
        self._keep(command, command.output, made_up(command.output, lengths))
        return self._report(began, command=command)

    def score(self, command: CallCommand) -> RankReport:
        """Keep made-up scores for the call's rows instead of calling a user's functions."""
        began = time.perf_counter()
        for key in command.call.outputs:
            self._keep(command, key, made_up("scores", [0] * len(command.rows)))
        return self._report(began, command=command)

    def compute(self, command: CallCommand) -> RankReport:
        """Run a computation on the call's rows, as a rank does. Raises InvalidInput if it changes its inputs."""
        assert command.function is not None  # a compute command has it
        function, inputs = command.function, self._inputs(command)
        held = {
            f"{port.source}.{key}": [(row, row._version) for row in rows]
            for port, columns in zip(inputs.ports, inputs.columns, strict=True)
            for key, rows in columns.items()
        }
        report = super().compute(replace(command, function=TriedFunction(function)))
        for name, rows in held.items():
            if any(row._version != version for row, version in rows):
                kept = "the rows as they were, since other calls read them: change a copy of each, row.clone()"
                expected = f"{kept} ({place_of(function)})"
                raise InvalidInput("rows that it changes", name, expected)
        return report

    def train_step(self, command: CallCommand) -> RankReport:
        """Run the losses on all rows as a single micro-batch, and compute their gradients.

        Raises InvalidInput for a loss without a gradient, and DependsOnOtherRows.
        """
        began = time.perf_counter()
        mixed: list[str] = []
        for one in command.passes:
            rows = training_rows(command, one, self.store, self._datasets)
            lengths = (rows.sequences.lengths_B - rows.sequences.prompt_lengths_B).tolist()
            for term, columns in zip(rows.terms, rows.columns, strict=True):
                outputs = [pad(made_up(output, lengths)).requires_grad_() for output in term.outputs]
                found = TriedFunction(term.loss)(*outputs, {key: column.clone() for key, column in columns.items()})
                parts = row_parts(term.mean_over, columns, rows.rows_per_item)
                try:
                    _, total = parts.loss_sum(found.values)
                    for name, values in found.metrics.items():
                        parts.metric_sum(name, values)
                except InvalidInput as error:
                    expected = f"{error.expected} ({place_of(term.loss)})"
                    raise InvalidInput(f"{term.name}: {error.field}", error.seen, expected) from error
                if not has_gradient(total, outputs):
                    expected = f"values that depend on {' or '.join(term.outputs)} ({place_of(term.loss)})"
                    raise InvalidInput(f"gradient of {term.name}", "none", expected)
                if depends_on_other_rows(TriedFunction(term.loss), outputs, columns, parts, found.values):
                    mixed.append(f"{term.name} ({place_of(term.loss)})")
        report = self._report(began, command=command)
        if mixed:
            raise DependsOnOtherRows("losses", ", ".join(mixed), "values of a row that depend on this row alone")
        return report


def made_up_play(lengths: Sequence[int]) -> dict[str, list[Tensor]]:
    """Return the other columns of plays with responses of these lengths: one turn each, with only the model's own
    tokens.
    """
    scores = made_up("scores", lengths)
    return {
        "mask": [torch.ones(length, dtype=torch.uint8) for length in lengths],
        "turn": [torch.zeros(length, dtype=torch.int16) for length in lengths],
        "turn_rewards": [score[None] for score in scores],
        "scores": scores,
    }


def depends_on_other_rows(
    loss: TriedFunction, outputs: Sequence[Tensor], columns: Mapping[str, Tensor], parts: RowParts, values: Tensor
) -> bool:
    """Whether a loss has other values for the rows of an item when they are alone in their micro-batch."""
    size = parts.rows_per_item
    for first in range(0, len(parts.row_B), size):
        rows = slice(first, first + size)
        alone = parts.of(rows)
        made = loss(*(each[rows] for each in outputs), {key: column[rows].clone() for key, column in columns.items()})
        together = values[rows] if len(values) == len(parts.row_B) else values[first // size][None]
        counted = (alone.mask_BT, alone.row_B, alone.item_P)[alone.unit(made.values, "a loss's values")] > 0
        if not torch.allclose(made.values[counted], together[counted], rtol=1e-3, atol=1e-6, equal_nan=True):
            return True
    return False


def place_of(function: object) -> str:
    """Return the file and line of an author's function."""
    return cast(Loadable, function).place


def has_gradient(total: Tensor, outputs: Sequence[Tensor]) -> bool:
    """Whether a loss depends on an output of the model, even if the gradient is 0.

    >>> logprobs = torch.tensor([-1.0], requires_grad=True)
    >>> has_gradient((0 * logprobs).sum(), [logprobs]), has_gradient(logprobs.detach().sum(), [logprobs])
    (True, False)
    """
    if not total.requires_grad:
        return False
    return any(gradient is not None for gradient in torch.autograd.grad(total, outputs, allow_unused=True))


def made_up(output: str, lengths: Sequence[int]) -> list[Tensor]:
    """Return possible results of a model for rows with these response lengths: numbers for each row, or for each token.

    >>> [values.tolist() for values in made_up("logprobs", [2, 1])]
    [[-0.5, -0.75], [-0.625]]
    """
    entry = OUTPUTS[output]
    if entry.per == "row":
        return [torch.full(entry.vector, 0.5 - 0.125 * row) for row in range(len(lengths))]
    places = [torch.arange(length, dtype=torch.float32) for length in lengths]
    numbers = [-0.5 - 0.125 * row % 4 - 0.25 * place for row, place in enumerate(places)]
    return numbers if entry.width is None else [each[:, None].repeat(1, entry.width) for each in numbers]
