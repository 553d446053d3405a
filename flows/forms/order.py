"""Orders an algorithm's parameters in a form (models, data, settings, then the others) and describes each in a line."""

import inspect
from collections.abc import Sequence
from typing import Annotated, Any, get_args, get_origin

from pydantic.fields import FieldInfo

from prefect_rlhf.blocks.dataset import DatasetParameter
from prefect_rlhf.blocks.model import Model
from prefect_rlhf.flows.forms.shape import types_at
from prefect_rlhf.tasks.host_rewards import HostRewards
from prefect_rlhf.tasks.play import Play
from prefect_rlhf.tasks.settings import Settings

OF_ROLES = {
    "actor": "The model that answers and is trained.",
    "critic": "The model that predicts values; it is trained too.",
    "ref": "The model that the actor must stay close to: usually the actor before training.",
}
HELD_OUT = "Rows for evaluations. They are not trained on."
SCORER = "What scores the responses: a reward model, or Python functions."
PLAY = "Turns with tools or an environment. A play scores its own rows, in place of a reward."
ALGO = "Settings of the algorithm."


def in_order(own: Sequence[inspect.Parameter]) -> list[inspect.Parameter]:
    """Return an algorithm's parameters as a person fills them in: models, data, settings, then the others.

    Within each group, the body's order stays.
    """
    return sorted(own, key=_place)


def _place(parameter: inspect.Parameter) -> int:
    kinds = types_at(parameter.annotation, ())
    for place, kind in enumerate(((Model, HostRewards), (DatasetParameter,), (Settings,))):
        if _has(kinds, *kind):
            return place if not _has(kinds, Play) else 3
    return 3


def described_parameter(parameter: inspect.Parameter) -> str:
    """Return a parameter's line: its type's description, or empty if the type's class says enough."""
    if own := _own_description(parameter.annotation):
        return own
    kinds = types_at(parameter.annotation, ())
    if _has(kinds, HostRewards):
        return SCORER
    if _has(kinds, Play):
        return PLAY
    if _has(kinds, Model):
        return OF_ROLES.get(parameter.name, "")
    if _has(kinds, DatasetParameter):
        return HELD_OUT if parameter.name == "held_out" else ""
    return ALGO if parameter.name == "algo" else ""


def _has(kinds: Sequence[Any], *bases: type) -> bool:
    return any(isinstance(kind, type) and issubclass(kind, bases) for kind in kinds)


def _own_description(annotation: Any) -> str:
    if get_origin(annotation) is not Annotated:
        return ""
    fields = [one for one in get_args(annotation)[1:] if isinstance(one, FieldInfo)]
    return next((field.description for field in fields if field.description), "")
