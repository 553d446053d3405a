"""The decorator that makes a flow function an algorithm: a Prefect flow named `rlhf` whose body is traced, never run.

To the body's own parameters it adds those that every run has (`RunOptions`), so that a deployment shows one form.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from importlib import import_module
from typing import Any

from prefect_rlhf.flows.forms.form_flow import FormFlow, form_entry
from prefect_rlhf.flows.forms.options import RunOptions
from prefect_rlhf.placement.errors import InvalidInput
from prefect_rlhf.tasks.trace import Algorithm

ALGORITHMS = ("ppo", "reward", "dpo", "grpo", "remax")


class AlgorithmFlow(FormFlow):
    """A Prefect flow that knows the algorithm it runs."""

    algorithm: Algorithm


def rlhf_flow(name: str) -> Callable[[Callable[..., None]], AlgorithmFlow]:
    """Make a body of generate, inference, compute and train_step calls the Prefect flow `rlhf`, algorithm `name`.

    >>> from prefect_rlhf.flows.ppo import ppo
    >>> ppo.name, ppo.algorithm.name
    ('rlhf', 'ppo')
    """

    def decorate(body: Callable[..., None]) -> AlgorithmFlow:
        algorithm = Algorithm(name, body)

        def run(parameters: dict[str, Any]) -> Any:
            from prefect_rlhf.flows.training.run import run_algorithm  # only here: to trace or plan takes no engine

            options, arguments = RunOptions.split(parameters)
            return run_algorithm(algorithm, arguments, options)

        flow = AlgorithmFlow(form_entry(body, RunOptions, run, _own_parameters(body)), name="rlhf")
        flow.algorithm = algorithm
        return flow

    return decorate


def _own_parameters(body: Callable[..., None]) -> list[inspect.Parameter]:
    """Return the body's parameters, each by keyword and with its type in place of the type's name."""
    hints = typing.get_type_hints(body, include_extras=True)
    return [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name])
        for name, parameter in inspect.signature(body).parameters.items()
    ]


def find_flow(name: str) -> AlgorithmFlow:
    """Return the flow that `name` stands for. Raises InvalidInput when there is none.

    >>> find_flow("ppo") is find_flow("prefect_rlhf.flows.ppo:ppo")
    True
    """
    module, _, attribute = (name if ":" in name else f"prefect_rlhf.flows.{name}:{name}").partition(":")
    try:
        flow = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidInput("algorithm", name, f"one of {', '.join(ALGORITHMS)}, or module:function") from error
    if not isinstance(flow, AlgorithmFlow):
        raise InvalidInput("algorithm", name, "a function decorated with @rlhf_flow")
    return flow
