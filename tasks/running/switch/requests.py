"""A run's switches between steps: planned before it starts, or requested while it runs."""

from collections import deque
from collections.abc import Iterable

from prefect_rlhf.placement.plan import EngineKind, ExecutionPlan
from prefect_rlhf.placement.plans.switch import PlanAt


class Switches:
    """A run's switches: those planned before it starts, and a switch that a check requests while it runs."""

    def __init__(self, planned: Iterable[PlanAt] = (), *, may_ask: bool = False) -> None:
        """With `may_ask`, the plans of a run are not all known when it starts."""
        self.may_ask = may_ask
        self._planned = deque(planned)
        self._asked: ExecutionPlan | None = None

    @property
    def plans(self) -> tuple[ExecutionPlan, ...]:
        """The plans to which switches are planned."""
        return tuple(switch.plan for switch in self._planned)

    @property
    def engines(self) -> set[EngineKind]:
        """The engines that the planned switches need."""
        return {placement.engine for plan in self.plans for _, placement in plan.placements}

    @property
    def planned(self) -> PlanAt | None:
        """The next planned switch."""
        return self._planned[0] if self._planned else None

    @property
    def asked(self) -> ExecutionPlan | None:
        """The plan to switch to as soon as the steps in flight allow it."""
        return self._asked

    def ask(self, plan: ExecutionPlan | None) -> None:
        """Request a switch to a plan, from any thread; None withdraws the request."""
        self._asked = plan

    def take(self, step: int) -> PlanAt:
        """Return the switch before `step`, which is due now: the run has finished its steps under the current plan."""
        if self._asked is not None:
            plan, self._asked = self._asked, None
            return PlanAt(step, plan)
        return self._planned.popleft()
