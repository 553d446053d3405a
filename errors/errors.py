"""Errors that a person can fix: a single line with the field, the value and a valid value.

RlhfError
    InvalidInput (also a ValueError)    a config, plan, dataset, checkpoint or cluster that cannot run
        UnknownKey                      a key, parameter or flag that does not exist
        Missing                         a value that has no default
        NotUsed                         a value that another setting leaves without effect
        SeveralMistakes                 all mistakes of a plan file, or all unknown keys of a parameter file
        TooLittleMemory                 devices that have too little memory for a call, or for any plan
            PlanDoesNotFit              a plan needs more memory than its devices have; carries the certificate
            NoClusterFits               no cluster of a table has enough memory; carries the table
        NoClusterSuffices               no cluster of a table has a plan, or a fast one; carries the table
    GraphError (also a ValueError)      a flow function that does not describe an algorithm
    NotFinite                           a loss or its gradient is not a finite number
    NothingLearnt                       too many steps in a row had no gradient
    BeyondBound                         scores of a model beyond the bound of scores
    StaleWeights                        a call was about to use another weight version than its edge names
    OutputFailed                        a file of the run could not be written: disk full, quota, read-only
    DeviceOutsideLease                  a task asked for a device that its run does not hold
    RankLost                            a rank process died
    RankSilent (also a TimeoutError)    a rank did not answer before its deadline
    RankFailed                          a call raised in a rank; carries the rank's one-line reason
        OutOfDeviceMemory               a device's memory, or its host's, did not suffice
        CollectiveFailed                communication between ranks broke, mostly because another rank died
        EngineFailed                    vLLM or the device failed inside

RunStopped is no error but a KeyboardInterrupt: a person stopped the run.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from prefect_rlhf.errors.in_short import in_short, one_line

MOST_MISTAKES = 8  # of a file, in a message


class RlhfError(Exception):
    """Base class of all errors that prefect-rlhf raises on purpose. Arguments are strings, so it pickles."""


class RunStopped(KeyboardInterrupt):
    """The run was stopped with Ctrl-C or SIGTERM. The message says how far it got and how to continue.

    `resume_from` is the newest checkpoint, None without one. `is_terminated` is true for SIGTERM.

    >>> print(RunStopped("stopped after 3 of 20 steps; newest checkpoint: step 2", "runs/fox/checkpoints/step-000002"))
    stopped after 3 of 20 steps; newest checkpoint: step 2; continue with resume_from=runs/fox/checkpoints/step-000002
    """

    def __init__(self, how_far: str, resume_from: str | None = None, is_terminated: bool = False) -> None:
        super().__init__(how_far, resume_from, is_terminated)
        self.how_far, self.resume_from, self.is_terminated = how_far, resume_from, is_terminated

    def __str__(self) -> str:
        return self.how_far + (f"; continue with resume_from={self.resume_from}" if self.resume_from else "")


class InvalidInput(RlhfError, ValueError):
    """Something you passed is wrong: `field` names it, `seen` is its value, `expected` says what would be right.

    The message is one short line.

    >>> print(InvalidInput("plan.calls.actor.tp", 2, "a divisor of the 9 attention heads"))
    plan.calls.actor.tp: got 2, expected a divisor of the 9 attention heads
    """

    def __init__(self, field: str, seen: object, expected: str) -> None:
        super().__init__(field, seen, expected)
        self.field, self.seen, self.expected = field, seen, expected

    def __str__(self) -> str:
        return one_line(f"{in_short(self.field, str)}: got {in_short(self.seen)}, expected {self.expected}")


@contextmanager
def refusing(
    errors: type[Exception] | tuple[type[Exception], ...], field: str, seen: object, expected: str, most: int = 120
) -> Iterator[None]:
    """Convert the body's `errors` to InvalidInput with the first `most` characters of their text; 0 leaves it out.

    >>> with refusing(ValueError, "--nodes", "two", "a whole number", most=0):
    ...     int("two")
    Traceback (most recent call last):
        ...
    prefect_rlhf.errors.errors.InvalidInput: --nodes: got 'two', expected a whole number
    """
    try:
        yield
    except errors as error:
        raise InvalidInput(field, seen, f"{expected} ({error!s:.{most}})" if most else expected) from error


class UnknownKey(InvalidInput):
    """A key that does not exist; `expected` is the hint that corrects it.

    >>> print(UnknownKey("algo.clipp", 0.2, "closest: clip"))
    algo.clipp: unknown key (got 0.2); closest: clip
    """

    def __str__(self) -> str:
        return one_line(f"{in_short(self.field, str)}: unknown key (got {in_short(self.seen)}); {self.expected}")


class Missing(InvalidInput):
    """A required value is missing; `expected` says what to give.

    >>> print(Missing("actor", "a model, such as {path: FOLDER}"))
    actor: missing; expected a model, such as {path: FOLDER}
    """

    def __init__(self, field: str, expected: str) -> None:
        super().__init__(field, None, expected)
        self.args = (field, expected)

    def __str__(self) -> str:
        return one_line(f"{in_short(self.field, str)}: missing; expected {self.expected}")


class NotUsed(InvalidInput):
    """A value that would have no effect, refused because you may count on it. `remedy` is an alternative to removing
    it.

    >>> print(NotUsed("algo.kl.horizon", 100, "a fixed coefficient has no target", "set kind: adaptive"))
    algo.kl.horizon: 100 is not used: a fixed coefficient has no target; remove it, or set kind: adaptive
    """

    def __init__(self, field: str, seen: object, reason: str, remedy: str = "") -> None:
        super().__init__(field, seen, f"no value: {reason}")
        self.args = (field, seen, reason, remedy)
        self.reason, self.remedy = reason, remedy

    def __str__(self) -> str:
        remedy = f", or {self.remedy}" if self.remedy else ""
        text = f"{in_short(self.field, str)}: {in_short(self.seen)} is not used: {self.reason}; remove it{remedy}"
        return one_line(text)


class SeveralMistakes(InvalidInput):
    """Several mistakes in the same file. Its own field, value and correction are the first mistake's.

    `remedy` ends the message.

    >>> print(SeveralMistakes([InvalidInput("plan.name", 2, "a text"), UnknownKey("plan.cals", {}, "closest: calls")]))
    2 mistakes: (1) plan.name: got 2, expected a text (2) plan.cals: unknown key (got {}); closest: calls
    """

    def __init__(self, mistakes: Sequence[InvalidInput], remedy: str = "") -> None:
        super().__init__(mistakes[0].field, mistakes[0].seen, mistakes[0].expected)
        self.args = (tuple(mistakes), remedy)
        self.mistakes, self.remedy = tuple(mistakes), remedy

    def __str__(self) -> str:
        shown = [f"({number}) {mistake}" for number, mistake in enumerate(self.mistakes[:MOST_MISTAKES], 1)]
        rest = len(self.mistakes) - len(shown)
        more = [f"and {rest} more"] if rest else []
        return " ".join([f"{len(self.mistakes)} mistakes:", *shown, *more, *([self.remedy] if self.remedy else [])])

    @classmethod
    def of(cls, mistakes: Sequence[InvalidInput], remedy: str = "") -> InvalidInput:
        """Return the error for these mistakes; a single mistake is returned as it is."""
        return mistakes[0] if len(mistakes) == 1 else cls(mistakes, remedy)


class TooLittleMemory(InvalidInput):
    """The devices have too little memory for a call, or for any plan; more devices may help."""

    def also(self, words: str) -> "TooLittleMemory":
        """Return the error with `words` at the end of its line."""
        return type(self)(self.field, self.seen, f"{self.expected}; {words}", *self.args[3:])


class PlanDoesNotFit(TooLittleMemory):
    """A plan needs more device memory than there is.

    `report` follows the message: a table of devices, their memory use, and changes that would make the plan fit.
    `details` is the same as JSON: `certificate` and `remedies`.
    """

    def __init__(self, field: str, seen: object, expected: str, report: str, details: str) -> None:
        super().__init__(field, seen, expected)
        self.args = (field, seen, expected, report, details)
        self.report, self.details = report, details


class NoClusterFits(TooLittleMemory):
    """No cluster in the table has enough memory for a plan. `report` is the table."""

    def __init__(self, field: str, seen: object, expected: str, report: str) -> None:
        super().__init__(field, seen, expected)
        self.args = (field, seen, expected, report)
        self.report = report


class NoClusterSuffices(InvalidInput):
    """No cluster in the table has a plan, or no plan reaches the required throughput. `report` is the table."""

    def __init__(self, field: str, seen: object, expected: str, report: str) -> None:
        super().__init__(field, seen, expected)
        self.args = (field, seen, expected, report)
        self.report = report


class GraphError(RlhfError, ValueError):
    """The body of an @rlhf_flow function cannot be recorded as a graph of calls; the message says why."""


class NotFinite(RlhfError):
    """A loss or its gradient is not a finite number. The weights are still those from before the step."""


class NothingLearnt(RlhfError):
    """No gradient for as many consecutive steps as the run allows (`most_empty_steps`)."""


class BeyondBound(RlhfError):
    """A model's scores are not finite, or too large to be scores."""


MISTAKES = (InvalidInput, GraphError, NotFinite, BeyondBound, NothingLearnt)
"""Errors that retrying cannot fix: a person has to."""


class StaleWeights(RlhfError):
    """A device holds another version of the weights than the call's edge names."""


class OutputFailed(RlhfError):
    """The run could not write a file; files from before stay."""


class DeviceOutsideLease(RlhfError):
    """A node's mesh includes a device that the run has not leased."""


class RankLost(RlhfError):
    """A rank process ended; the gang cannot continue."""


class RankSilent(RlhfError, TimeoutError):
    """A rank did not answer before its call's deadline."""


class RankFailed(RlhfError):
    """A call raised in a rank process. `traceback` is the rank's own, for the log; empty if unknown."""

    traceback: str = ""


class OutOfDeviceMemory(RankFailed):
    """A call ran out of memory on a device, or on its host."""


class CollectiveFailed(RankFailed):
    """Communication between ranks broke, usually because another rank died."""


class EngineFailed(RankFailed):
    """An engine or its device failed internally; its state must not be used again."""
