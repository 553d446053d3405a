"""`plan: auto`: search for a plan on the leased mesh before the run, log its quality, and store it.

A stored plan is a plan file with a summary of its search in its first lines. Its name is a hash of the whole question.
"""

import hashlib
from importlib.metadata import version
from pathlib import Path

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.files.atomic_file import write_atomically
from prefect_rlhf.flows.hardware.profiles import describe_sources
from prefect_rlhf.flows.training.choice.searched_plan import plan_file, summary
from prefect_rlhf.flows.training.log import LogLine
from prefect_rlhf.placement.layout.alignment import aligned
from prefect_rlhf.placement.memory.certificate import Certificate
from prefect_rlhf.placement.memory.fit import check_fits
from prefect_rlhf.placement.plan import ExecutionPlan
from prefect_rlhf.placement.planner.best_plan import plan_graph
from prefect_rlhf.placement.planner.planned import Planned
from prefect_rlhf.placement.planner.question import Question
from prefect_rlhf.placement.plans.check import check_plan
from prefect_rlhf.placement.plans.plan_file import read_plan
from prefect_rlhf.placement.plans.stated_words import NO_WORDS, Words

EVALUATIONS = 1_000_000  # of a search: a plan is worth more to a run than to a question
PLANS = Path("~/.prefect-rlhf/plans")


def auto_plan(question: Question, say: LogLine, words: Words = NO_WORDS) -> tuple[ExecutionPlan, Certificate]:
    """Return the best known plan with these words, and its certificate.

    The plan is found now, or was found by an earlier run with the same question. Raises InvalidInput if no plan with
    these words fits.
    """
    file = PLANS.expanduser() / f"{question_hash(question, words)}.yaml"
    plan = remembered_plan(file, question, say)
    if plan is not None:
        return plan, check_fits(plan, question.graph, question.workload, question.site.backend)
    planned = search_plan(question, say, words)
    text = plan_file(planned, planned.plan)
    write_atomically(file, lambda part: part.write_text(text))
    return planned.plan, planned.certificate


def search_plan(question: Question, say: LogLine, words: Words = NO_WORDS) -> Planned:
    """Search with `EVALUATIONS` and log the result."""
    say(describe_sources(question.site.sources))
    planned = plan_graph(question, evaluations=EVALUATIONS, progress=lambda progress: say(str(progress)), words=words)
    say(summary(planned))
    return planned


def question_hash(question: Question, words: Words = NO_WORDS) -> str:
    """Return a hash of everything an automatic plan depends on. Equal values have equal texts."""
    site = question.site
    where = (site.cluster, site.mesh, site.backend)
    values = (question.graph, *where, question.workload, site.sources, EVALUATIONS, version("prefect-rlhf"))
    stated = sorted((call, sorted(values.items())) for call, values in words.items())
    return hashlib.sha256(repr((values, stated)).encode()).hexdigest()[:32]


def remembered_plan(file: Path, question: Question, say: LogLine) -> ExecutionPlan | None:
    """Return the plan in `file`, or None if the file does not exist or its plan no longer runs."""
    if not file.is_file():
        return None
    graph, site = question.graph, question.site
    try:
        plan = aligned(check_plan(read_plan(file, site.cluster), graph, site.mesh), graph)
    except InvalidInput as error:
        say(f"the plan stored in {file} does not run here, so a new search starts ({error})")
        return None
    comments = [line.removeprefix("# ") for line in file.read_text().splitlines() if line.startswith("# ")]
    say("\n".join([f"stored plan: {file}", *comments]))
    return plan
