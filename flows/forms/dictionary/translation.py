"""Translates a job: the outcome of each option, and the parameters that make a run here do the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from prefect_rlhf.flows.forms.dictionary.dialect import NAMES
from prefect_rlhf.flows.forms.dictionary.job import Job
from prefect_rlhf.flows.forms.dictionary.rule import NULL, Rule, Untranslatable, Unused
from prefect_rlhf.flows.forms.dictionary.settings_here import ROWS, default_of
from prefect_rlhf.flows.forms.dictionary.shared import YOUR_FILE
from prefect_rlhf.tasks.settings import set_by_dotted_name

What = Literal["translated", "without effect", "refused", "unknown"]
MOST_OF_A_DUMP = 60  # options at their defaults: more are no choice of a person
IN_THE_PLAN = "the plan has it, as {ours} of a call; results do not depend on it"


@dataclass(frozen=True, slots=True)
class Made:
    """A parameter here, with the rule that made its value, and the arithmetic in numbers."""

    path: str
    value: Any
    rule: Rule
    arithmetic: str = ""

    @property
    def how(self) -> str:
        """The arithmetic and the rule's note."""
        note = f" ({self.rule.note})" if self.rule.note else ""
        return (f" = {self.arithmetic}" if self.arithmetic else "") + note


@dataclass(frozen=True, slots=True)
class Outcome:
    """An option's outcome. `why` is the reason if it is not translated."""

    option: str
    value: Any
    what: What
    made: tuple[Made, ...] = ()
    why: str = ""


@dataclass(frozen=True, slots=True)
class Translation:
    """A job's parameters here, each option's and default's outcome, and the values that you still have to fill in."""

    job: Job
    made: tuple[Made, ...]
    outcomes: tuple[Outcome, ...]
    of_defaults: tuple[Outcome, ...]
    to_fill_in: Mapping[str, tuple[Any, str]]

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters of a run, nested as in a parameter file."""
        whole: dict[str, Any] = {}
        values = {each.path: each.value for each in self.made}
        for path, value in (values | {path: value for path, (value, _) in self.to_fill_in.items()}).items():
            set_by_dotted_name(whole, path, None if value is NULL else value)
        return whole

    @property
    def assumes_devices(self) -> bool:
        """Whether a parameter depends on the number of devices."""
        return any("devices" in each.rule.formula for each in self.made)


def translation(job: Job) -> Translation:
    """Translate a job."""
    made, problems = _made(job)
    outcomes = [_outcome(job, option, made, problems) for option in job.stated]
    if sum(not job.differs(option) for option in job.stated) > MOST_OF_A_DUMP:
        outcomes = [each for each in outcomes if each.what == "unknown" or job.differs(each.option)]
    of_defaults = tuple(_of_defaults(job, made, problems, {each.option for each in outcomes}))
    return Translation(job, tuple(made.values()), tuple(outcomes), of_defaults, _gaps(job, made, problems))


def _made(job: Job) -> tuple[dict[str, Made], dict[str, Exception]]:
    """Return the parameters by their names, and for others the reason why no rule makes one."""
    made: dict[str, Made] = {}
    problems: dict[str, Exception] = {}
    for rule in job.dialect.rules:
        if rule.where != "file" or rule.ours in made or isinstance(problems.get(rule.ours), Untranslatable):
            continue
        try:
            if (value := job.made_by(rule)) is not None:
                made[rule.ours] = Made(rule.ours, value, rule, job.written(rule))
        except (Untranslatable, Unused) as error:
            problems[rule.ours] = error
    problems = {path: error for path, error in problems.items() if path not in made}
    return {path: each for path, each in made.items() if _is_needed(job, each)}, problems


def _is_needed(job: Job, made: Made) -> bool:
    """Whether the file has to say it: somebody stated it, or it is not our default."""
    is_default = made.value is not NULL and made.value == default_of(job.flow, made.path)
    return not is_default or any(job.differs(each) for each in made.rule.stands_for)


def _outcome(job: Job, option: str, made: Mapping[str, Made], problems: Mapping[str, Exception]) -> Outcome:
    """Say what becomes of an option that the file states."""
    dialect, value = job.dialect, job.stated[option]
    rules = dialect.rules_of(option)
    if found := tuple(each for each in made.values() if each.rule in rules):
        return Outcome(option, value, "translated", found)
    errors = [error for rule in rules if (error := _problem(job, rule, problems)) is not None]
    if wrong := next((error for error in errors if isinstance(error, Untranslatable)), None):
        return Outcome(option, value, "refused", why=str(wrong))
    if elsewhere := next((rule for rule in rules if rule.where in ("plan", "play")), None):
        return _stated_elsewhere(job, option, elsewhere)
    if errors:
        return Outcome(option, value, "without effect", why=str(errors[0]))
    refusal = dialect.refusal_of(option)
    if refusal is not None and (not _is_off(value) if job.differs(option) else refusal.by_default):
        return Outcome(option, value, "refused", why=refusal.reason)
    if (why := dialect.effect_of(option)) is not None:
        return Outcome(option, value, "without effect", why=why)
    if rules or refusal is not None:
        of_theirs = "off" if job.differs(option) else f"the default of {NAMES[dialect.library]}, so it changes nothing"
        why = "the default here too" if rules else of_theirs
        return Outcome(option, value, "without effect", why=why)
    return Outcome(option, value, "unknown")


def _problem(job: Job, rule: Rule, problems: Mapping[str, Exception]) -> Exception | None:
    if rule.where != "check":
        return problems.get(rule.ours)
    try:
        job.made_by(rule)
    except (Untranslatable, Unused) as error:
        return error
    return None


def _stated_elsewhere(job: Job, option: str, rule: Rule) -> Outcome:
    """Return the outcome of an option that belongs into a plan, or into a play, which is code of the reader's."""
    value = job.stated[option]
    if rule.where == "plan":
        return Outcome(option, value, "without effect", why=IN_THE_PLAN.format(ours=rule.ours))
    if not job.differs(option) or _is_off(value):
        return Outcome(option, value, "without effect", why="no play is translated")
    try:
        stated = f"{rule.ours}: {job.made_by(rule)}" if rule.is_arithmetic else rule.ours
    except (Untranslatable, Unused):
        stated = rule.ours
    return Outcome(option, value, "refused", why=f"a play is code of yours (docs/environments.md): {stated}")


def _is_off(value: Any) -> bool:
    """Whether a value turns its option off, whatever the default is."""
    return value in (None, False, 0, [], {}, "")


def _of_defaults(
    job: Job, made: Mapping[str, Made], problems: Mapping[str, Exception], told: set[str]
) -> Iterator[Outcome]:
    """Yield the defaults of the library that are not ours: as parameters, or as what has no counterpart.

    `told` are options whose outcome is told anyway.
    """
    by_option: dict[tuple[str, ...], list[Made]] = {}
    for each in made.values():
        options = job.dialect.options_of(each.rule)
        if not told.intersection(options) and (options or each.rule.note):
            by_option.setdefault(options[:1] or ("", each.path), []).append(each)
    for (option, *_), found in by_option.items():
        yield Outcome(option, job[option] if option else None, "translated", tuple(found))
    for path, error in problems.items():
        rules = [rule for rule in job.dialect.rules if rule.ours == path]
        options = tuple(option for rule in rules for option in job.dialect.options_of(rule))
        if isinstance(error, Untranslatable) and options and not told.intersection(options):
            option = next((each for each in options if job.dialect.defaults.get(each) is not None), options[0])
            yield Outcome(option, job[option], "refused", why=str(error))
    for option, refusal in job.dialect.refused.items():
        if refusal.by_default and option not in told and job[option] is not None:
            yield Outcome(option, job[option], "refused", why=refusal.reason)


def _gaps(job: Job, made: Mapping[str, Made], problems: Mapping[str, Exception]) -> dict[str, tuple[Any, str]]:
    """Return what a run needs and the other file does not say, with words for you to replace."""
    gaps: dict[str, tuple[Any, str]] = {}
    for path, (word, what) in job.dialect.needs.items():
        if path not in made and not any(other.startswith(f"{path}.") for other in made):
            gaps[path] = (word, what)
    functions = made.get("reward.functions")
    if functions is not None and f"{YOUR_FILE}:" in str(functions.value):
        gaps["reward.functions"] = (functions.value, f"{YOUR_FILE} is a file of yours with these functions")
    rows = ROWS[job.flow]
    if "held_out.path" in gaps:
        gaps |= _copies(made, gaps, rows, "held_out", gaps["held_out.path"][1])
    if (
        "actor.path" in gaps
        and any(rule.ours == "ref.path" for rule in job.dialect.rules)
        and "ref.path" not in problems
    ):
        gaps["ref.path"] = (gaps["actor.path"][0], "")
    return gaps


def _copies(
    made: Mapping[str, Made], gaps: Mapping[str, tuple[Any, str]], source: str, group: str, what: str
) -> dict[str, tuple[Any, str]]:
    """Return the fields of a group that repeat those of another."""
    fields: Sequence[Made] = [each for each in made.values() if each.path.startswith(f"{source}.")]
    copied = {f"{group}.path": (gaps[f"{source}.path"][0] if f"{source}.path" in gaps else "", what)}
    for each in fields:
        field = each.path.removeprefix(f"{source}.")
        if f"{group}.{field}" not in made:
            copied[f"{group}.{field}"] = (each.value, what if field == "path" else "")
    return copied
