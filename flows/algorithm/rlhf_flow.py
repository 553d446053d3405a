"""The decorator that makes a flow function an algorithm: a Prefect flow named `rlhf` whose body is traced, never run.

It adds the parameters of every run (`RunOptions`) to the body's own, so that a deployment shows a single form.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from prefect.exceptions import ParameterBindError

from prefect_rlhf.errors.blame import described
from prefect_rlhf.errors.errors import GraphError, InvalidInput
from prefect_rlhf.files.modules import IN_RANK, import_from
from prefect_rlhf.files.path_text import resolved
from prefect_rlhf.flows.algorithm.places import expected_flow, find_place, no_module
from prefect_rlhf.flows.forms.form_flow import FormFlow, form_entry, own_parameters
from prefect_rlhf.flows.forms.options import RunOptions
from prefect_rlhf.flows.training.run_name import naming
from prefect_rlhf.tasks.server.patience import wait_for_server
from prefect_rlhf.tasks.tracing.trace import Algorithm

OF_PREFECT = ("return_state", "wait_for")  # arguments of the call of a flow


class AlgorithmFlow(FormFlow):
    """A Prefect flow that knows the algorithm it runs."""

    algorithm: Algorithm

    def __call__(self, *arguments: Any, **parameters: Any) -> Any:
        """Run the algorithm. Raises GraphError if it is called by importing a file in a rank."""
        self.check_not_in_rank()
        check_by_name(self.algorithm.name, arguments)
        try:
            return super().__call__(**parameters)
        except ParameterBindError:
            self.validate_parameters({name: one for name, one in parameters.items() if name not in OF_PREFECT})
            raise

    def check_not_in_rank(self) -> None:
        """Raise GraphError in a rank. A rank imports your file to find a function, and would otherwise start a run."""
        if IN_RANK in os.environ:
            name = self.algorithm.name
            raise GraphError(
                f'importing the file of {name} starts a run; put the call under `if __name__ == "__main__":`'
            )


def check_by_name(called: str, arguments: Sequence[object]) -> None:
    """Raise InvalidInput for positional arguments: parameters are passed by name."""
    if arguments:
        right = f"parameters by name: {called}(actor=..., steps=...)"
        if isinstance(arguments[0], Mapping):
            right = f"parameters by name; two stars name those of a mapping: {called}(**parameters)"
        raise InvalidInput(called, arguments[0], right)


def rlhf_flow(name: str) -> Callable[[Callable[..., None]], AlgorithmFlow]:
    """Turn a function into a Prefect flow that trains with the algorithm `name`.

    The function's body calls generate, inference, score, compute, select and train_step. It runs once, to record these
    calls; each step then runs them where the plan puts them. The Prefect flow itself is named `rlhf`. Raises GraphError
    for a function that is async, has a yield, or has a parameter without a type.

    >>> from prefect_rlhf.flows.ppo import ppo
    >>> ppo.name, ppo.algorithm.name
    ('rlhf', 'ppo')
    """

    if not isinstance(name, str):
        seen = getattr(name, "__name__", repr(name))
        raise GraphError(f'@rlhf_flow: got {seen:.60}, expected the algorithm\'s name: @rlhf_flow("{seen:.60}")')

    def decorate(body: Callable[..., None]) -> AlgorithmFlow:
        algorithm = Algorithm(name, body)

        def run(parameters: dict[str, Any]) -> Any:
            # Imported here: tracing and planning need no engine.
            from prefect_rlhf.flows.training.run import run_algorithm

            return run_algorithm(algorithm, parameters)

        flow = AlgorithmFlow(
            form_entry(body, RunOptions, run, own_parameters(body)), name="rlhf", flow_run_name=naming(name)
        )
        flow.algorithm = algorithm
        if "PREFECT__FLOW_RUN_ID" in os.environ and IN_RANK not in os.environ:
            wait_for_server()  # it started this process, so it was up before
        return flow

    return decorate


def find_flow(name: str) -> AlgorithmFlow:
    """Find a flow by an algorithm's name, by `module:function` or by `path/to/file.py:function`.

    The module may be in the working folder, as with `python -m`. Raises InvalidInput if the name does not exist, or if
    your file raises an error; the message then says which error, and where.

    >>> find_flow("ppo") is find_flow("prefect_rlhf.flows.ppo:ppo")
    True
    """
    place, function = find_place(name)
    module = _import_place(name, place)
    found = getattr(module, function, None)
    if not isinstance(found, AlgorithmFlow):
        flows = [key for key, value in vars(module).items() if isinstance(value, AlgorithmFlow)]
        problem = "does not exist"
        if hasattr(module, function):
            remedy = f': put @rlhf_flow("{function}") above its def, and no other decorator' if callable(found) else ""
            problem = f"is a {type(found).__name__}{remedy}"
        raise InvalidInput("algorithm", name, expected_flow(place, function, flows, problem))
    return found


def _import_place(name: str, place: str) -> ModuleType:
    """Import the module or file before the colon of `name`. Raises InvalidInput."""
    file = resolved(Path(place)) if place.endswith(".py") else None
    if file is None and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return import_module(place) if file is None else import_from(file.stem, str(file))
    except ModuleNotFoundError as error:
        if file is None and error.name and f"{place}.".startswith(f"{error.name}."):
            raise InvalidInput("algorithm", name, no_module(error.name)) from error
        raise InvalidInput("algorithm", name, f"a file that can be imported; it raised {described(error)}") from error
    except (Exception, SystemExit) as error:
        raise InvalidInput("algorithm", name, f"a file that can be imported; it raised {described(error)}") from error
