"""The switches of a run between its steps: planned before it starts, or asked for while it runs."""

from collections import deque
from collections.abc import Iterable

from prefect_rlhf.placement.plan import EngineKind, ExecutionPlan
from prefect_rlhf.placement.plans.switch import PlanAt


class Switches:
    """The switches of a run: those planned before it starts, and a switch that a check asks for while it runs."""

    def __init__(self, planned: Iterable[PlanAt] = (), *, may_ask: bool = False) -> None:
        """With `may_ask`, the plans of a run are not all known when it starts."""
        self.may_ask = may_ask
        self._planned = deque(planned)
        self._asked: ExecutionPlan | None = None

    @property
    def plans(self) -> tuple[ExecutionPlan, ...]:
        """The plans of the planned switches."""
        return tuple(switch.plan for switch in self._planned)

    @property
    def engines(self) -> set[EngineKind]:
        """The engines of the planned switches."""
        return {placement.engine for plan in self.plans for _, placement in plan.placements}

    @property
    def planned(self) -> PlanAt | None:
        """The next planned switch."""
        return self._planned[0] if self._planned else None

    @property
    def asked(self) -> ExecutionPlan | None:
        """The plan to switch to as soon as the steps in flight permit it."""
        return self._asked

    def ask(self, plan: ExecutionPlan | None) -> None:
        """Ask for a switch to a plan, from any thread; None takes the request back."""
        self._asked = plan

    def take(self, step: int) -> PlanAt:
        """Return the switch before `step`, where the run has left its plan: it is due now."""
        if self._asked is not None:
            plan, self._asked = self._asked, None
            return PlanAt(step, plan)
        return self._planned.popleft()
