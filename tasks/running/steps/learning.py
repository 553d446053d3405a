"""Warns by a step's metrics if a run does not learn: steps without a gradient, and other signs that it goes wrong.

It uses metrics only. A resumed run reads the earlier steps' metrics, so it decides the same way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import final

from prefect_rlhf.errors.errors import NothingLearnt
from prefect_rlhf.placement.graph import Call, DataflowGraph

WARN_AFTER = 3  # steps in a row
MOST_SHARE = 0.5  # of the answers cut, and of the rows without a reward
MOST_KL_PER_TOKEN = 0.2
"""Nats. TRL's training FAQ advises a KL of 0 to 10 nats; a response of its PPO has 53 tokens by default."""
MOST_CHANGE = 0.1
"""Nats a token between two engines of one model. In bfloat16 SmolLM2-135M has 0.04 on every processor (2026-11-28)."""
KL_METRICS = ("kl_per_token", "kl")


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a step has no gradient, and what you can do about it."""

    words: str
    remedy: str


NO_REWARD = Cause("no row has a reward", "let the reward return a number for some rows")
CUT = "every answer was cut and masked"
EQUAL = Cause(
    "no group differs",
    "use prompts that the model answers now well, now badly, or a reward that tells its answers apart",
)
NO_ADVANTAGE = Cause("every advantage is 0", "let the advantages of a step differ")
NOT_IN_LOSS = Cause("no row in the loss", "let the mask and the weights of the loss leave some rows")
NO_GRADIENT = Cause("no gradient", "use a loss that depends on the model's output, and pairs whose answers differ")


@dataclass(frozen=True, slots=True)
class Findings:
    """Findings from a step's metrics: a phrase for its line, new warnings, and the error that ends the run."""

    phrase: str = ""
    warnings: tuple[str, ...] = ()
    error: NothingLearnt | None = None


@final
class Learning:
    """Follows a run step by step. A step is empty if no role that it trains has a gradient."""

    def __init__(
        self, graph: DataflowGraph, most_empty_steps: int | None = None, limited: Collection[str] = ()
    ) -> None:
        """End a run after `most_empty_steps` empty steps in a row (None: never), and again after as many more.

        `limited` are metrics to which the user has set a limit: with a limit of a KL, ours does not hold.
        """
        self._most = most_empty_steps
        self._trains = tuple(call for call in graph if call.kind == "train_step")
        self._before = {call.name: frozenset(calls_before(graph, call.name)) for call in self._trains}
        self._evaluations = frozenset(call.name for call in graph if call.every is not None)
        generates = [call for call in graph if call.kind == "generate" and call.every is None]
        self._lengths = {f"{call.name}.truncated": length_of(call) for call in generates}
        self._judges_kl = not any(name.rpartition(".")[2] in KL_METRICS for name in limited)
        self._empty_steps = 0
        self._idle: Counter[str] = Counter()  # steps in a row without a gradient, by train_step
        self._equal: Counter[str] = Counter()  # steps in a row whose advantages are all 0, by train_step
        self._said: set[tuple[str, ...]] = set()
        self._warnings: list[str] = []

    @property
    def warnings(self) -> tuple[str, ...]:
        """All warnings so far, each once."""
        return tuple(self._warnings)

    def go_on(self, earlier: Sequence[Mapping[str, float]]) -> None:
        """Take in the steps before a resumed run."""
        for metrics in earlier:
            self.step_ended(metrics)

    def step_ended(self, metrics: Mapping[str, float]) -> Findings:
        """Take in a step's metrics; return the findings.

        A role with a learning rate of 0 is not judged, and a step without a judged role changes no count.
        """
        trained = {name: value for name, value in metrics.items() if name.partition(".")[0] not in self._evaluations}
        judged = {call: idle for call in self._trains if (idle := is_idle(call, trained)) is not None}
        before, step = len(self._warnings), f"step {int(metrics['step'])}"
        for call, idle in judged.items():
            self._idle[call.name] = self._idle[call.name] + 1 if idle else 0
            equal = not idle and self._has_no_advantage(call, trained)
            self._equal[call.name] = self._equal[call.name] + 1 if equal else 0
        idle_calls = [call for call, idle in judged.items() if idle]
        error = None
        if judged and len(idle_calls) == len(judged):
            self._empty_steps += 1
            cause = self._cause(idle_calls[0], trained)
            error, phrase = self._empty(step, cause), f"{cause.words}: nothing learnt"
        else:
            self._empty_steps = 0 if judged else self._empty_steps
            phrase = self._partly_empty(step, list(judged), trained)
        for sign in self._signs(step, trained):
            self._warn(*sign)
        return Findings(phrase, self.warnings[before:], error)

    def _empty(self, step: str, cause: Cause) -> NothingLearnt | None:
        """Warn about empty steps; return the error once they are too many."""
        count, most = self._empty_steps, self._most
        empty = f"{step}: {count} steps in a row without a gradient ({cause.words})"
        if most is not None and count % most == 0:
            allow = "or allow more such steps by most_empty_steps (null: any number)"
            return NothingLearnt(f"{empty}; {cause.remedy}, {allow}")
        if count >= WARN_AFTER:
            end = "" if most is None else f"; the run ends after {most} such steps in a row (most_empty_steps)"
            self._warn(("empty", cause.words), f"{empty}: nothing is learnt; {cause.remedy}{end}")
        return None

    def _partly_empty(self, step: str, judged: Sequence[Call], metrics: Mapping[str, float]) -> str:
        """Warn about roles that do not learn beside others that do; return the phrase."""
        phrases = []
        for call in judged:
            idle, equal, cause = self._idle[call.name], self._equal[call.name], self._cause(call, metrics)
            if idle:
                phrases.append(f"{cause.words}: {call.role} learnt nothing")
            elif equal:
                phrases.append(cause.words)
            if idle >= WARN_AFTER:
                text = f"{step}: {call.role} had no gradient in {idle} steps in a row ({cause.words}); {cause.remedy}"
                self._warn(("role", call.name, cause.words), text)
            if equal >= WARN_AFTER:
                text = f"{step}: {cause.words} in {equal} steps in a row, so no reward moves {call.role}"
                self._warn(("equal", call.name, cause.words), f"{text}; {cause.remedy}")
        return ", ".join(dict.fromkeys(phrases))

    def _signs(self, step: str, metrics: Mapping[str, float]) -> Iterator[tuple[tuple[str, ...], str]]:
        """Yield a key and a text for each sign in a step's metrics."""
        name, share = largest({name: metrics[name] for name in self._lengths if name in metrics}, "truncated")
        if share > MOST_SHARE:
            remedy = f"raise {self._lengths[name]}, or teach shorter answers"
            yield ("cut",), f"{step}: {share:.0%} of the answers were cut ({name}); {remedy}"
        name, share = largest(metrics, "unscored")
        if share > MOST_SHARE:
            remedy = "such rows teach nothing: let the reward return a number for more of them"
            yield ("unscored",), f"{step}: {share:.0%} of the rows have no reward ({name}); {remedy}"
        for call in self._trains if metrics["step"] == 1 else ():  # later answers may come from older weights
            changes = first_changes(call.name, metrics)
            name = max(changes, key=changes.__getitem__, default="")
            if name and changes[name] > MOST_CHANGE:
                far = f"the engine that answers and the one that trains differ by {changes[name]:.2g} nats per token"
                remedy = f"they have the same weights, so one rounds badly or is wrong; try {call.role}.dtype=float32"
                yield ("engines", call.name), f"{step}: {far}, above {MOST_CHANGE} ({name}); {remedy}"
        name, kl = largest(per_token(metrics), "kl_per_token")
        if kl > MOST_KL_PER_TOKEN and self._judges_kl:
            far = f"the KL to the reference is {kl:.3g} nats per token, above {MOST_KL_PER_TOKEN} ({name})"
            rates = " or ".join(dict.fromkeys(call.setting("lr") for call in self._trains))
            remedy = f"lower {rates or 'the learning rate'} or raise the KL coefficient"
            yield ("kl",), f"{step}: {far}; {remedy}; limits sets another bound"

    def _warn(self, key: tuple[str, ...], text: str) -> None:
        if key not in self._said:
            self._said.add(key)
            self._warnings.append(text)

    def _has_no_advantage(self, call: Call, metrics: Mapping[str, float]) -> bool:
        return any(metrics.get(f"{name}.zero_advantage") == 1 for name in self._before[call.name])

    def _cause(self, call: Call, metrics: Mapping[str, float]) -> Cause:
        """Return why a train_step has no gradient, from the metrics of the calls before it."""
        of = {name: Values(name, metrics) for name in self._before[call.name]}
        if any(found["unscored"] == 1 for found in of.values()):
            return NO_REWARD
        equal = any(found["zero_deviation"] == 1 for found in of.values())
        kept_none = next((name for name in sorted(of) if of[name]["kept_rows"] == 0), None)
        if kept_none is not None and not equal:
            return Cause(f"{kept_none:.40} kept no row", f"let {kept_none} keep more")
        if any(found["truncated"] == 1 and found["trained_tokens"] == 0 for found in of.values()):
            lengths = [length for name, length in self._lengths.items() if name.rpartition(".")[0] in of]
            raised = " and ".join(lengths) or "the longest answer"
            return Cause(CUT, f"raise {raised}, or set algo.overlong.mask to false")
        if kept_none is None and Values(call.name, metrics)["skipped_updates"] == call.epochs * call.mini_batches:
            return NOT_IN_LOSS
        if equal:
            return EQUAL
        return NO_ADVANTAGE if self._has_no_advantage(call, metrics) else NO_GRADIENT


@dataclass(frozen=True, slots=True)
class Values:
    """A call's metrics by the last word of their names; None for a metric that it lacks."""

    call: str
    metrics: Mapping[str, float]

    def __getitem__(self, word: str) -> float | None:
        return self.metrics.get(f"{self.call}.{word}")


def is_idle(call: Call, metrics: Mapping[str, float]) -> bool | None:
    """Whether no update of a train_step had a gradient; None if it did not run, or ran at a learning rate of 0."""
    of = Values(call.name, metrics)
    if not any(name.startswith(f"{call.name}.") for name in metrics) or of["learning_rate"] == 0:
        return None
    without = (of["skipped_updates"] or 0) + (of["empty_updates"] or 0)
    return without >= call.epochs * call.mini_batches


def length_of(call: Call) -> str:
    """Return the settings that limit the length of a generate call's answers, as you would write them."""
    return call.setting("max_new_tokens") if call.play is None else "play.max_tokens or play.max_turns"


def calls_before(graph: DataflowGraph, name: str) -> set[str]:
    """Return the calls that a call depends on through rows, directly or through others."""
    found: set[str] = set()
    left = [name]
    while left:
        new = [source for source in graph.reads_of(left.pop()) if source not in found]
        found.update(new)
        left += new
    return found


def largest(metrics: Mapping[str, float], word: str) -> tuple[str, float]:
    """Return the largest metric with this last word, and its name; 0 if no metric has it."""
    found = [(name, value) for name, value in metrics.items() if name.rpartition(".")[2] == word]
    return max(found, key=lambda each: each[1], default=("", 0.0))


def first_changes(train_step: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """Return each loss term's `change` before the first update.

    >>> first_changes("train", {"train.initial_change": 0.1, "train.initial_policy.change": 0.2, "train.change": 1.0})
    {'train.initial_change': 0.1, 'train.initial_policy.change': 0.2}
    """
    prefix = f"{train_step}.initial_"
    return {
        name: value
        for name, value in metrics.items()
        if name.startswith(prefix) and name.removeprefix(prefix).rpartition(".")[2] == "change"
    }


def per_token(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return `kl_per_token` of each call with a KL: its own, or a response's KL divided by `response_tokens`.

    >>> per_token({"rewards.kl": 6.0, "rewards.response_tokens": 12.0, "other.kl": 1.0})
    {'rewards.kl_per_token': 0.5}
    """
    found = {name: value for name, value in metrics.items() if name.endswith(".kl_per_token")}
    for name, kl in metrics.items():
        call, _, word = name.rpartition(".")
        tokens = metrics.get(f"{call}.response_tokens")
        if word == "kl" and tokens:
            found.setdefault(f"{call}.kl_per_token", kl / tokens)
    return found
