"""Fills in a flow function's arguments for a question: models without weights, datasets that need not exist."""

import inspect
import typing
from collections.abc import Mapping
from typing import Any

from prefect_rlhf.blocks.dataset import DatasetFields
from prefect_rlhf.blocks.model import Model
from prefect_rlhf.errors.errors import InvalidInput, Missing, NotUsed
from prefect_rlhf.flows.algorithm.rlhf_flow import AlgorithmFlow
from prefect_rlhf.flows.forms.options import RunOptions
from prefect_rlhf.flows.forms.plan_options import PlanOptions
from prefect_rlhf.flows.training.inputs import ABSENT
from prefect_rlhf.placement.cost.workload import LengthDistribution
from prefect_rlhf.tasks.host_rewards import HostRewards
from prefect_rlhf.tasks.model_shape import model_shape
from prefect_rlhf.tasks.rl.settings.offline import REFERENCE_FREE
from prefect_rlhf.tasks.tracing.trace import EVALUATION

LIKE = {"ref": "actor", "reward": "critic", "cost": "critic", "cost_critic": "critic"}
"""Roles with the model of another role by default; if that role is unnamed too, they have the actor's model."""
UNNAMED_FUNCTION = {"functions": {"reward": {"function": "your_module:your_reward"}}}
"""The default reward: a plan does not import it."""
SCALAR_ROLES = ("critic", "reward", "cost", "cost_critic")  # the roles whose default head is scalar


def read_arguments(flow: AlgorithmFlow, options: PlanOptions, responses: LengthDistribution | None) -> dict[str, Any]:
    """Return the body's arguments, typed. Unnamed models and datasets are filled in.

    If the options state lengths of `responses`, the sampling limit is the longest of them.
    """
    hints = typing.get_type_hints(flow.algorithm.body)
    names = inspect.signature(flow.algorithm.body).parameters
    for role in options.models:
        if not _may_be(hints.get(role), Model):
            roles = ", ".join(name for name in names if _may_be(hints[name], Model))
            raise InvalidInput("models", role, f"a role of {flow.algorithm.name}: {roles}")
    _check_models(options.models)
    settings = getattr(hints.get("algo"), "model_fields", {})
    values = {name: value for name, value in options.parameters.items() if name not in RunOptions.model_fields}
    shared = _shares_trunk(values)
    for name, parameter in names.items():
        if _may_be(hints[name], Model):
            if name in options.models or not _may_do_without(hints, name, values, settings):
                values[name] = _model_fields(name, values.get(name), options.models, names, shared)
            elif _may_be(hints[name], HostRewards) and not values.get("play"):
                values.setdefault(name, UNNAMED_FUNCTION)
        elif isinstance(hints[name], type) and issubclass(hints[name], DatasetFields):
            values.setdefault(name, {"path": ABSENT})
        elif name not in values and parameter.default is inspect.Parameter.empty:
            raise Missing(name, "a value: the algorithm has no default for it")
    has_play = bool(values.get("play"))
    if algo := _algorithm_settings(values.get("algo") or {}, settings, options.batch_size, responses, has_play):
        values["algo"] = algo
    checked = flow.validate_parameters(values)
    return {name: checked[name] for name in (*names, EVALUATION)}


def _check_models(models: Mapping[str, str]) -> None:
    """Raise InvalidInput for all unknown model names together, before missing models are reported."""
    wrong: dict[str, InvalidInput] = {}
    for role, name in models.items():
        try:
            model_shape(role, name)
        except InvalidInput as error:
            wrong[f"{role}={name}"] = error
    if len(wrong) > 1:
        right = "; ".join(dict.fromkeys(each.expected for each in wrong.values()))
        raise InvalidInput("models", ", ".join(wrong), right)
    for only in wrong.values():
        raise only


def _may_be(hint: Any, kind: type) -> bool:
    """Whether a parameter of this type accepts `kind`."""
    return hint is kind or any(_may_be(part, kind) for part in typing.get_args(hint))


def _may_do_without(
    hints: Mapping[str, Any], role: str, values: Mapping[str, Any], settings: Mapping[str, Any]
) -> bool:
    """Whether an unnamed role needs no model: functions score, no reference is needed, or the actor gives the values.

    Functions score if the parameters state them, or if no other role has a suitable model.
    """
    hint, given = hints[role], values.get(role)
    if _may_be(hint, HostRewards):
        if given is None and values.get("play"):
            return True
        if given is None:
            return LIKE.get(role) not in hints
        return isinstance(given, HostRewards) or (isinstance(given, dict) and "functions" in given)
    algo = values.get("algo") or {}
    if not _may_be(hint, type(None)) or given is not None:
        return False
    if role in SCALAR_ROLES:
        return _shares_trunk(values)
    if "kl" not in settings:
        return algo.get("loss") in REFERENCE_FREE
    kl = settings["kl"].default.model_dump() | dict(algo.get("kl") or {})
    return bool(kl["coefficient"] == 0)


def _shares_trunk(values: Mapping[str, Any]) -> bool:
    """Whether the actor also computes the values."""
    actor = values.get("actor")
    head = actor.get("head", "") if isinstance(actor, dict) else getattr(actor, "head", "")
    return head == "lm+scalar"


def _model_fields(
    role: str, value: Any, models: Mapping[str, str], roles: Mapping[str, Any], shared: bool
) -> dict[str, Any]:
    """Return the fields of a Model parameter; a path in `models` has priority."""
    fields = dict(value) if isinstance(value, dict) else {} if value is None else value.model_dump()
    like = LIKE.get(role, "")
    if like == "critic" and shared:
        like = "actor"
    named = models.get(role) or fields.get("path") or fields.get("saved") or (models.get(like) if like in roles else "")
    if not named:
        also = f", or a model for {like}" if like in roles else ""
        raise Missing(f"models.{role}", f"a known model, such as llama-70b, or a Hugging Face folder{also}")
    if not fields.get("saved"):
        fields["path"] = named
    return {"head": "scalar" if role in SCALAR_ROLES else "lm"} | fields


def _algorithm_settings(
    values: Mapping[str, Any],
    fields: Mapping[str, Any],
    batch_size: int | None,
    responses: LengthDistribution | None,
    has_play: bool,
) -> dict[str, Any]:
    """Return the algorithm's settings with `batch_size` and the longest response, if it has fields for them.

    The longest response of a play is not that of a turn, which is what the algorithm samples.
    """
    algo = dict(values)
    if batch_size is not None:
        if "batch_size" not in fields:
            raise NotUsed("batch_size", batch_size, "the algorithm has no algo.batch_size")
        algo["batch_size"] = batch_size
    if responses is not None and "sampling" in fields and not has_play:
        algo["sampling"] = {"max_new_tokens": responses.longest} | dict(algo.get("sampling") or {})
    return algo
