"""Predictions for a run: its first steps under each plan, and its switches."""

from collections.abc import Callable, Mapping, Sequence

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.flows.hardware.profiles import describe_sources
from prefect_rlhf.flows.training.choice.plans_by_step import ChosenAt
from prefect_rlhf.flows.training.log import log_info
from prefect_rlhf.flows.training.probed import contradicted_profiles
from prefect_rlhf.flows.training.request import RunRequest
from prefect_rlhf.placement.augmented.augmented_graph import AugmentedGraph
from prefect_rlhf.placement.augmented.node import SWITCH
from prefect_rlhf.placement.augmented.preview import distant_nodes, preview
from prefect_rlhf.placement.plan import EngineKind, ExecutionPlan
from prefect_rlhf.placement.schedule.estimate import Prediction, predict
from prefect_rlhf.placement.schedule.switch import NOT_MEASURED, assumed_starts, switch_seconds
from prefect_rlhf.tasks.reporting.report import LaterPlan


def predict_run(request: RunRequest, augmented: AugmentedGraph) -> Prediction | None:
    """Predict each node's time. Returns None for unknown hardware, which does not stop a run with a given plan."""
    try:
        later = distant_nodes(augmented, request.spec.checkpoint_every)
        prediction = predict(augmented, request.workload, request.cost_sources, later)
    except InvalidInput as error:
        log_info(f"no predictions: {error}")
        return None
    for line in (describe_sources(request.cost_sources), *contradicted_profiles(request)):
        log_info(line)
    return prediction


def later_plan(
    request: RunRequest,
    before: ExecutionPlan,
    after: ChosenAt,
    starts: Mapping[EngineKind, float] = NOT_MEASURED,
) -> LaterPlan:
    """Return the graph of the first steps under a later plan, with predicted times of its nodes and of the switch.

    `starts` are engines' measured start-up times in seconds.
    """
    plan, spec = after.chosen.plan, request.spec
    augmented = preview(request.graph, plan, spec.steps, after.step - 1, spec.checkpoint_every)
    prediction = predict_run(request, augmented)
    seconds = None if prediction is None else switch_seconds(request.graph, before, plan, request.cost_sources, starts)
    assumed = assumed_starts(request.graph, before, plan, starts)
    return LaterPlan(after.chosen.certificate, augmented, prediction, seconds, assumed)


def predicted_by(first: Prediction | None, later: Sequence[LaterPlan]) -> Callable[[str], float | None]:
    """Return a node's predicted seconds under its step's plan, by node id; `later` may grow."""

    def seconds(node: str) -> float | None:
        step, prediction = int(node.rpartition("@")[2]), first
        for plan in later:
            if node == f"{SWITCH}@{plan.step}":
                return plan.switch_seconds
            prediction = plan.prediction if step >= plan.step else prediction
        return prediction.worked_seconds(node) if prediction else None

    return seconds
