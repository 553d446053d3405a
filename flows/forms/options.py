"""The parameters of every run, for any algorithm: its length, plan, seed, checkpoints and output."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, WithJsonSchema
from pydantic_core import PydanticCustomError

from prefect_rlhf.files.path_text import MOST_CHARACTERS, PathText
from prefect_rlhf.flows.forms.placement_words import PlacementWords
from prefect_rlhf.flows.forms.share import Share
from prefect_rlhf.tasks.profiling.limits import MOST_TOKENS
from prefect_rlhf.tasks.settings import MOST_STEPS, Settings
from prefect_rlhf.tasks.trackers.tracking import Tracking

MOST_RESTARTS = 1000
MOST_SEED = 2**32 - 1  # exact in a browser's form, and accepted by every library


LONGEST_SECONDS = 7 * 86400
Seconds = Annotated[float, Field(ge=1, le=LONGEST_SECONDS)]
Role = Annotated[str, Field(min_length=1, max_length=256)]
CallName = Annotated[str, Field(min_length=1, max_length=256)]
MetricName = Annotated[str, Field(min_length=1, max_length=256)]


def _branch(plan: object) -> str:
    """Return the branch of `Plan` that a value means, so that an error is about that branch."""
    return "<by step>" if isinstance(plan, Mapping) else "<single>"


def _numbered(plans: object) -> object:
    """Return the plans with numbers for steps in digits, as JSON states them.

    Another text of a number is refused: the plan of `01` would replace the plan of `1`.
    """
    if not isinstance(plans, Mapping):
        return plans
    texts = [step for step in plans if isinstance(step, str)]
    if not all(re.fullmatch("-?(0|[1-9][0-9]{0,8})", step) for step in texts):
        raise PydanticCustomError("plan", "steps in plain digits, such as 1 and 41")
    numbered = {int(step) if isinstance(step, str) else step: plan for step, plan in plans.items()}
    if len(numbered) < len(plans):
        raise PydanticCustomError("plan", "each step once")
    return numbered


_Step = Annotated[int, Field(ge=1, le=MOST_STEPS)]
_PlansByStep = Annotated[dict[_Step, PathText], BeforeValidator(_numbered), Tag("<by step>")]
_TEXT_SCHEMA: dict[str, Any] = {"type": "string", "maxLength": MOST_CHARACTERS}
Plan = Annotated[
    Annotated[PathText, Tag("<single>")] | _PlansByStep,
    Discriminator(_branch),
    WithJsonSchema({"anyOf": [_TEXT_SCHEMA, {"type": "object", "additionalProperties": _TEXT_SCHEMA}]}),
]
"""A plan's name or file, or several by their first step."""


def _off(value: object) -> object:
    """Return `off` for false: YAML reads the word as a truth value."""
    return "off" if value is False else value


def _in_words(value: object) -> object:
    """Return the text of a number of tokens: YAML reads `256` as a number. The form refuses any other value."""
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST_TOKENS:
        return str(value)
    return value


Lengths = Annotated[
    PathText,
    BeforeValidator(_in_words),
    WithJsonSchema({"anyOf": [_TEXT_SCHEMA, {"type": "integer", "minimum": 1, "maximum": MOST_TOKENS}]}),
]
"""Tokens of a row: a number, shares, or the path of rollouts."""


def _in_a_list(value: object) -> object:
    """Return the names in a text, which commas separate: a shell needs no quotes for it."""
    return [name.strip() for name in value.split(",")] if isinstance(value, str) else value


_NAMES_SCHEMA: dict[str, Any] = {"type": "array", "items": {"type": "string"}, "maxItems": 64}
Names = Annotated[
    tuple[Annotated[str, Field(min_length=1, max_length=256)], ...],
    BeforeValidator(_in_a_list),
    Field(strict=False, max_length=64),
    WithJsonSchema({"anyOf": [_NAMES_SCHEMA, _TEXT_SCHEMA]}),
]
"""Dotted names of parameters, in a list or in a text with commas."""


class Form(Settings):
    """Fields that a flow function takes as keyword parameters, so that its form shows them."""

    @classmethod
    def signature(cls) -> list[inspect.Parameter]:
        """Return these fields as a flow function's keyword parameters."""
        return [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if field.is_required() else field.default,
                annotation=Annotated[field.annotation, field],  # keeps bounds and description in the form
            )
            for name, field in cls.model_fields.items()
        ]

    @classmethod
    def described(cls, doc: str, own: Mapping[str, str]) -> str:
        """Return `doc` with an `Args` section, from which Prefect's form takes the parameters' descriptions.

        `own` describes further parameters by name; an empty description gets no line.
        """
        descriptions = {**own, **{name: field.description for name, field in cls.model_fields.items()}}
        lines = [f"    {name}: {line}" for name, line in descriptions.items() if line]
        return "\n".join([doc, "", "Args:", *lines])


class RunOptions(Form):
    """Options of every run; each deployment's form shows them after the algorithm's own parameters."""

    steps: int = Field(10, ge=1, le=MOST_STEPS, description="Iterations of the algorithm.")
    epochs: int | None = Field(
        None, ge=1, le=MOST_STEPS, description="Passes over the data; give it instead of `steps`."
    )
    plan: Plan = Field(
        "flattening",
        description="auto, measure(k), a preset's name, a plan file's path, or plans by step: {1: auto, 41: p.yaml}.",
    )
    placement: dict[CallName, PlacementWords] = Field(
        {},
        description="Fix parts of a call's placement, such as actor_train: {micro_batches: 16}; the preset or plan "
        "file decides the rest.",
    )
    expected_response_length: Lengths = Field(
        "",
        description="How long you expect responses to be, in tokens, for the planner: 256, shares such as "
        "256:3,1024:1, or an earlier run's rollouts. Empty: as long as allowed.",
    )
    replan: Annotated[Literal["off", "say", "switch"], BeforeValidator(_off)] = Field(
        "say", description="If measured steps show a better plan: say names it, switch uses it, off never looks."
    )
    replan_gain: float = Field(
        0.1, ge=0.03, le=0.9, description="How much of the step time a better plan must save, as a share."
    )
    replan_every: int = Field(20, ge=5, le=MOST_STEPS, description="With replan: switch, steps between two checks.")
    headroom: Share | None = Field(
        None,
        description="Share of each device that plans leave free, such as 10%; empty leaves 4% of a GPU, and on CPU "
        "what its process takes besides tensors.",
    )
    seed: int = Field(
        1, ge=0, le=MOST_SEED, description="Decides the rows' order and every sampled token; plans do not change them."
    )
    checkpoint_every: int | None = Field(
        None, ge=1, le=MOST_STEPS, description="Steps between checkpoints; empty writes no checkpoints."
    )
    keep_checkpoints: int = Field(
        2, ge=1, le=MOST_STEPS, description="How many of the run's newest checkpoints to keep on disk."
    )
    best_metric: PathText | None = Field(
        None,
        min_length=1,
        description="Evaluation metric that selects the best model, such as record_evaluation.score.",
    )
    best_is: Literal["highest", "lowest"] = Field(
        "highest", description="Whether the highest or the lowest best_metric is best."
    )
    patience: int | None = Field(
        None, ge=1, le=MOST_STEPS, description="Stop after this many evaluations without improvement."
    )
    most_empty_steps: int | None = Field(
        10,
        ge=1,
        le=MOST_STEPS,
        description="End the run after this many steps in a row without a gradient; empty: never.",
    )
    resume_from: PathText | None = Field(
        None, description="Continue from this run or checkpoint folder; latest is the newest checkpoint in output_dir."
    )
    resume_changes: Names = Field(
        (), description="Parameters that may differ from the checkpoint's, such as algo.optimizer.lr."
    )
    output_dir: PathText = Field(
        "runs", min_length=1, description="Folder for this run's models, rollouts and metrics."
    )
    export_merged: bool = Field(
        False, description="Also write models with an adapter as whole models, merged into their base."
    )
    dry_run: bool = Field(False, description="Check everything, print plan and graph, use no device.")
    steps_per_group: int = Field(2, ge=1, le=10_000, description="Number of steps per subflow run.")
    tracking: Tracking = Field(Tracking(), description="Where to show metrics: TensorBoard, MLflow, Weights & Biases.")
    call_deadline_seconds: float = Field(
        900.0, ge=1, le=LONGEST_SECONDS, description="Time limit for a call, in seconds."
    )
    role_deadlines: dict[Role, Seconds] = Field(
        {}, description="Time limits for the calls of some roles, in seconds, such as actor: 1800."
    )
    start_deadline_seconds: float | None = Field(
        None, ge=1, le=LONGEST_SECONDS, description="Time limit for the ranks' imports; empty: 120 s, 30 s per rank."
    )
    limits: dict[MetricName, Annotated[float, Field(ge=-1e12, le=1e12)]] = Field(
        {}, description="Upper limits of metrics; a higher value emits an event: kl_penalised_rewards.kl: 20."
    )

    @property
    def stated_words(self) -> dict[str, dict[str, Any]]:
        """The stated words of each call; calls without stated words are left out."""
        return {call: words for call, placed in self.placement.items() if (words := placed.stated)}

    @classmethod
    def split(cls, parameters: Mapping[str, Any]) -> tuple[RunOptions, dict[str, Any]]:
        """Split a run's parameters into these options and the arguments of the algorithm's body."""
        options = {name: value for name, value in parameters.items() if name in cls.model_fields}
        return cls(**options), {name: value for name, value in parameters.items() if name not in options}
