"""The decorator that makes a flow function an algorithm: a Prefect flow named `rlhf` whose body is traced, never run.

To the body's own parameters it adds those that every run has (`RunOptions`), so that a deployment shows one form.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from importlib import import_module
from typing import Any

from prefect import Flow

from prefect_rlhf.flows.forms.check import check_parameters
from prefect_rlhf.flows.forms.options import RunOptions
from prefect_rlhf.placement.errors import InvalidInput
from prefect_rlhf.tasks.trace import Algorithm


def rlhf_flow(name: str) -> Callable[[Callable[..., None]], AlgorithmFlow]:
    """Make a body of generate, inference, compute and train_step calls the Prefect flow `rlhf`, algorithm `name`.

    >>> from prefect_rlhf.flows.ppo import ppo
    >>> ppo.name, ppo.algorithm.name
    ('rlhf', 'ppo')
    """
    return lambda body: AlgorithmFlow(entry_point(Algorithm(name, body)), name="rlhf")


class AlgorithmFlow(Flow[..., Any]):
    """A Prefect flow that knows the algorithm it runs."""

    def validate_parameters(self, parameters: dict[str, Any]) -> dict[str, Any]:
        """The parameters as their types. Raises InvalidInput for the first mistake, where Prefect would list types."""
        check_parameters(inspect.signature(self.fn), parameters)
        return super().validate_parameters(parameters)

    @property
    def algorithm(self) -> Algorithm:
        algorithm = getattr(self.fn, "algorithm")  # noqa: B009  set by entry_point; survives Flow.with_options
        assert isinstance(algorithm, Algorithm)
        return algorithm


def entry_point(algorithm: Algorithm) -> Callable[..., Any]:
    """The function that Prefect calls: the body's parameters and the run's, as one signature."""

    def entry(**parameters: Any) -> Any:
        from prefect_rlhf.flows.training.run import run_algorithm  # only here: to trace or plan a flow takes no engine

        options = RunOptions(**{key: parameters.pop(key) for key in RunOptions.model_fields})
        return run_algorithm(algorithm, parameters, options)

    body = algorithm.body
    entry.__name__, entry.__qualname__, entry.__module__ = body.__name__, body.__qualname__, body.__module__
    entry.__doc__ = RunOptions.described(inspect.getdoc(body) or algorithm.name)
    entry.__signature__ = inspect.Signature(_parameters(body), return_annotation=dict)  # type: ignore[attr-defined]  # read by inspect
    entry.__annotations__ = {parameter.name: parameter.annotation for parameter in _parameters(body)}
    entry.algorithm = algorithm  # type: ignore[attr-defined]  # functions take attributes; AlgorithmFlow.algorithm reads it
    return entry


def _parameters(body: Callable[..., None]) -> list[inspect.Parameter]:
    hints = typing.get_type_hints(body, include_extras=True)
    own = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name])
        for name, parameter in inspect.signature(body).parameters.items()
    ]
    return [*own, *RunOptions.signature()]


ALGORITHMS = ("ppo", "reward", "dpo", "grpo", "remax")


def find_flow(name: str) -> AlgorithmFlow:
    """The flow that `name` stands for. Raises InvalidInput when there is none.

    >>> find_flow("ppo") is find_flow("prefect_rlhf.flows.ppo:ppo")
    True
    """
    module, _, attribute = (name if ":" in name else f"prefect_rlhf.flows.{name}:{name}").partition(":")
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidInput("algorithm", name, f"one of {', '.join(ALGORITHMS)}, or module:function") from error
    if not isinstance(found, AlgorithmFlow):
        raise InvalidInput("algorithm", name, "a function decorated with @rlhf_flow")
    return found
