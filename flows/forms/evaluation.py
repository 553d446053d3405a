"""Named evaluation sets: their prompts, rewards and sampling, and the calls that they add to a run."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field, StringConstraints, model_validator

from prefect_rlhf.blocks.dataset import DatasetParameter, Prompts
from prefect_rlhf.blocks.model import Model
from prefect_rlhf.errors.errors import InvalidInput, Missing, NotUsed
from prefect_rlhf.errors.wrong_setting import wrong
from prefect_rlhf.tasks.host_rewards import HostRewards
from prefect_rlhf.tasks.play import Play
from prefect_rlhf.tasks.rl.evaluation.sets import ANSWER, MOST_SAMPLES, PREFIX, K, SetSettings, record_set
from prefect_rlhf.tasks.settings import GREEDY, LOWEST_TEMPERATURE, MOST_STEPS, Sampling, Settings
from prefect_rlhf.tasks.tracing.calls import compute, generate, score
from prefect_rlhf.tasks.tracing.trace import EVALUATION, RowsHandle, Trace, current_trace, data_name

DESCRIPTION = "Further sets of prompts to evaluate on, each under its name: {math: {data: {path: math.jsonl}}}."
SetName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z][A-Za-z0-9_-]*$", max_length=60)]


class EvaluationSet(Settings):
    """A named set of prompts to evaluate a run's model on, with the sampling of responses and their reward.

    >>> EvaluationSet(data=Prompts(path="math.jsonl"), samples=4).samples
    4
    """

    data: Prompts = Field(description="The prompts; every row of the split is answered.")
    reward: HostRewards | None = Field(None, description="Functions that score the responses; empty: as in training.")
    play: Play | None = Field(None, description="Turns with tools or an environment; empty: as in training.")
    samples: int = Field(1, ge=1, le=MOST_SAMPLES, description="Responses to each prompt.")
    temperature: float | None = Field(
        None, ge=0, le=2, description="Empty: greedy for a single sample; for several, as in training."
    )
    top_p: float | None = Field(None, ge=0.001, le=1, description="Empty: as in training.")
    max_new_tokens: int | None = Field(
        None, ge=1, le=1 << 20, description="Longest response, in tokens; empty: as in training."
    )
    every: int | None = Field(
        None, ge=1, le=MOST_STEPS, description="Steps between evaluations; empty: algo.evaluate_every."
    )
    pass_at: tuple[K, ...] = Field(
        (), strict=False, max_length=64, description="Each k of pass@k; empty: 1, 2, 4, ... and the number of samples."
    )
    right_score: float = Field(
        1.0, ge=-1e9, le=1e9, description="For pass@k: the score from which a response counts as right."
    )

    @model_validator(mode="after")
    def _can_be_drawn(self) -> EvaluationSet:
        """Refuse a k above the number of samples, samples that are all equal, and settings of chance without any."""
        if self.pass_at and (most := max(self.pass_at)) > self.samples:
            raise wrong(self, "samples", f"at least {most}, for pass@{most}; or lower pass_at")
        if self.temperature is not None and 0 < self.temperature < LOWEST_TEMPERATURE:
            raise wrong(self, "temperature", f"0, which is greedy, or at least {LOWEST_TEMPERATURE}")
        if self.samples > 1 and self.temperature == 0:
            right = f"above 0, or samples: 1; the {self.samples} samples of a prompt would be equal"
            raise wrong(self, "temperature", right)
        return self

    def trace(self, name: str, arguments: Mapping[str, Any]) -> None:
        """Add the calls of the set `name` to the body: generate responses, score them, and record the metrics.

        Raises InvalidInput for a set without a reward, and for settings that neither the set nor the algorithm states.
        """
        trace, field = current_trace(EVALUATION), f"{EVALUATION}.{name}"
        role, every = answering(trace, field), self._every(trace, field, arguments)
        play = self.play if self.play is not None or self.reward is not None else arguments.get("play")
        reward = self.reward or (None if play is not None else arguments.get("reward"))
        if reward is None and play is None:
            raise Missing(f"{field}.reward", "functions that score the responses, as the algorithm has no reward")
        if reward is not None and play is not None:
            raise NotUsed(f"{field}.reward", "functions", "play scores its own rows")
        sampling = self._sampling(field, arguments, is_play=play is not None)
        rollout = generate(
            arguments[role],
            self.data,
            sampling=sampling,
            samples=self.samples,
            every=every,
            play=play,
            name=f"{role}_{call_name(name)}",
        )
        own = trace.calls[-1]
        trace.calls[-1] = replace(own, operation=replace(own.operation, parameter=field))
        scores = rollout if reward is None else self._scores(trace, reward, rollout, every, name)
        settings = self.recorded(name, own.max_new_tokens)
        compute(record_set, rollout, scores, settings=settings, every=every, name=call_name(name))

    def recorded(self, name: str, max_new_tokens: int) -> SetSettings:
        """Return the settings for recording this set; its responses have at most this many tokens."""
        return SetSettings(
            folder=call_name(name),
            samples=self.samples,
            pass_at=self.pass_at,
            right_score=self.right_score,
            max_new_tokens=max_new_tokens,
        )

    def _scores(
        self, trace: Trace, reward: Model | HostRewards, rollout: RowsHandle, every: int | None, name: str
    ) -> RowsHandle:
        """Score the responses; several samples also with the answers in them, if functions score."""
        scores = score(reward, rollout, every=every, name=f"reward_{call_name(name)}")
        if self.samples == 1 or not isinstance(reward, HostRewards):
            return scores
        own = trace.calls.pop()
        return trace.add(replace(own, outputs=(*own.outputs, ANSWER)))

    def _every(self, trace: Trace, field: str, arguments: Mapping[str, Any]) -> int | None:
        """Return the steps between evaluations; None in a run that only evaluates."""
        if all(call.kind != "train_step" for call in trace.calls):
            return None
        every = self.every or getattr(arguments.get("algo"), "evaluate_every", None)
        if every is None:
            raise Missing(f"{field}.every", "a number of steps, because the algorithm has no algo.evaluate_every")
        return int(every)

    def _sampling(self, field: str, arguments: Mapping[str, Any], *, is_play: bool) -> Sampling:
        """Return how responses are drawn: as in training, apart from the set's own settings."""
        trained = getattr(arguments.get("algo"), "sampling", None)
        if trained is None and self.max_new_tokens is None and not is_play:
            raise Missing(f"{field}.max_new_tokens", "a number of tokens, because the algorithm has no algo.sampling")
        base = trained if isinstance(trained, Sampling) else Sampling()
        if self.temperature == 0 or (self.temperature is None and self.samples == 1):
            if self.top_p not in (None, 1.0):
                raise NotUsed(f"{field}.top_p", self.top_p, "a greedy response is not random", "set temperature")
            base, stated = base.greedy(), {}
        else:
            stated = {"temperature": self.temperature, "top_p": self.top_p}
        stated |= {"max_new_tokens": self.max_new_tokens}
        made = base.model_copy(update={name: value for name, value in stated.items() if value is not None})
        if self.samples > 1 and any(getattr(made, one) == value for one, (value, _) in GREEDY.items()):
            right = f"above 0, since algo.sampling is greedy: the {self.samples} samples of a prompt would be equal"
            raise InvalidInput(f"{field}.temperature", self.temperature, right)
        return made


Sets = dict[SetName, EvaluationSet]
EVALUATION_PARAMETER = inspect.Parameter(
    EVALUATION,
    inspect.Parameter.KEYWORD_ONLY,
    default={},
    annotation=Annotated[Sets, Field(max_length=64, description=DESCRIPTION)],
)


def call_name(name: str) -> str:
    """Return the name of the call that records a set; its metrics' names begin with it.

    >>> call_name("math")
    'evaluation_math'
    """
    return f"{PREFIX}{name}"


def metric_name(written: str) -> str:
    """Return a metric's name as in a run's files; `written` may also begin as the parameter does.

    >>> metric_name("evaluation.math.pass@4"), metric_name("record_evaluation.score")
    ('evaluation_math.pass@4', 'record_evaluation.score')
    """
    first, *rest = written.split(".", 2)
    return f"{call_name(rest[0])}.{rest[1]}" if first == EVALUATION and len(rest) > 1 else written


def answering(trace: Trace, field: str) -> str:
    """Return the role that answers: the first that generates, or else the language model that is trained."""
    generating = [call.role for call in trace.calls if call.kind == "generate" and call.role]
    trained = [call.role for call in trace.calls if call.kind == "train_step" and call.role]
    speaking = [role for role in (*trained, *trace.models) if trace.models[role].head != "scalar"]
    if not (found := [*generating, *speaking]):
        raise NotUsed(field, "a set of prompts", f"{trace.flow} has no model that generates")
    return found[0]


def datasets_in(arguments: Mapping[str, Any]) -> dict[str, DatasetParameter]:
    """Return the datasets among a run's arguments, including those of sets, by the dotted names of their parameters."""
    found = {name: value for name, value in arguments.items() if isinstance(value, DatasetParameter)}
    return found | {data_name(name): one.data for name, one in arguments.get(EVALUATION, {}).items()}


def with_others(arguments: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's arguments with `others` in place of some; names may be dotted, as in `datasets_in`."""
    changed = {name: others.get(name, value) for name, value in arguments.items()}
    if sets := arguments.get(EVALUATION):
        changed[EVALUATION] = {
            name: one.model_copy(update={"data": others.get(data_name(name), one.data)}) for name, one in sets.items()
        }
    return changed


def plays_of(dataset: str, arguments: Mapping[str, Any]) -> list[Play]:
    """Return the plays for a dataset's rows: a set may have its own play, or a reward instead of the run's play."""
    shared = [value for value in arguments.values() if isinstance(value, Play)]
    sets = {data_name(name): one for name, one in arguments.get(EVALUATION, {}).items()}
    own = sets.get(dataset)
    if own is None or (own.play is None and own.reward is None):
        return shared
    return [] if own.play is None else [own.play]
