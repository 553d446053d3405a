"""A Prefect flow whose form shows typed parameters, each with its description."""

import inspect
import typing
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from prefect import Flow

from prefect_rlhf.errors.errors import GraphError, PlanDoesNotFit, RlhfError
from prefect_rlhf.files.storable import Storable
from prefect_rlhf.flows.forms.check import checked_parameters
from prefect_rlhf.flows.forms.evaluation import EVALUATION_PARAMETER
from prefect_rlhf.flows.forms.options import Form
from prefect_rlhf.flows.forms.order import described_parameter, in_order
from prefect_rlhf.flows.forms.retry import may_retry
from prefect_rlhf.tasks.reporting.refusal import show_refusal
from prefect_rlhf.tasks.server.failures import failed, is_by_hand, stopped
from prefect_rlhf.tasks.tracing.trace import EVALUATION


class FormFlow(Flow[..., Any]):
    """A Prefect flow that rejects a wrong parameter with a single line instead of Prefect's list of types."""

    def validate_parameters(self, parameters: dict[str, Any]) -> dict[str, Any]:
        """Return the parameters converted to their types. Raises InvalidInput for the first mistake."""
        checked = checked_parameters(inspect.signature(self.fn), parameters)
        return super().validate_parameters(checked)  # adds defaults; typed values stay as they are


def form_entry(
    body: Callable[..., Any],
    form: type[Form],
    run: Callable[[dict[str, Any]], Any],
    own: Sequence[inspect.Parameter] = (),
) -> Callable[..., Any]:
    """Return the function that Prefect calls: it has the name of `body` and passes its keywords to `run`.

    Its parameters are `own`, models first, then the fields of `form`. Raises GraphError if both have one of the same
    name. A mistake that a person can correct ends the run in a Failed state with a single-line message, without a
    traceback. A run that a person stops ends in a Cancelled state.
    """

    if taken := [parameter.name for parameter in own if parameter.name in form.model_fields]:
        expected = f"another name: every run has a parameter {taken[0]}"
        raise GraphError(f"{body.__name__}: got a parameter {taken[0]!r}, expected {expected}")

    def entry(**parameters: Any) -> Any:
        try:
            while True:
                try:
                    return run(parameters)
                except RlhfError as error:
                    if isinstance(error, PlanDoesNotFit):
                        show_refusal(error)
                    if not may_retry(error):
                        return failed(error)
        except BaseException as error:
            if not is_by_hand(error):
                raise
            return stopped(error)

    parameters = [
        parameter.replace(annotation=Annotated[parameter.annotation, Storable()])
        for parameter in (*in_order(own), *form.signature())
    ]
    entry.__name__, entry.__qualname__, entry.__module__ = body.__name__, body.__qualname__, body.__module__
    lines = {parameter.name: described_parameter(parameter) for parameter in own}
    entry.__doc__ = form.described(inspect.getdoc(body) or body.__name__, lines)
    entry.__signature__ = inspect.Signature(parameters, return_annotation=dict)  # type: ignore[attr-defined]  # read by inspect
    entry.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return entry


def own_parameters(body: Callable[..., None]) -> list[inspect.Parameter]:
    """Return the body's parameters as keyword parameters, with types in place of the types' names.

    The last parameter, `evaluation`, names sets that any algorithm's run can evaluate on. Raises GraphError if the body
    has a parameter of this name.
    """
    hints = typing.get_type_hints(body, include_extras=True)
    if EVALUATION in inspect.signature(body).parameters:
        expected = f"another name: every run has a parameter {EVALUATION}"
        raise GraphError(f"{body.__name__}: got a parameter {EVALUATION!r}, expected {expected}")
    own = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name])
        for name, parameter in inspect.signature(body).parameters.items()
    ]
    return [*own, EVALUATION_PARAMETER]
