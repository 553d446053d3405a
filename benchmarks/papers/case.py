"""One setting of a paper's experiments, and its plans: the best one, and those of presets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.papers.plans import TimedPlan, best_with_moves
from prefect_rlhf.blocks.model import Model
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.flows.dpo import dpo
from prefect_rlhf.flows.grpo import grpo
from prefect_rlhf.flows.ppo import ppo
from prefect_rlhf.flows.remax import remax
from prefect_rlhf.placement.cost.datasheets.hardware import Hardware
from prefect_rlhf.placement.cost.execution import Execution
from prefect_rlhf.placement.cost.sources import CostSources
from prefect_rlhf.placement.cost.workload import Workload
from prefect_rlhf.placement.devices.mesh import ClusterShape
from prefect_rlhf.placement.graph import Call, DataflowGraph, Dataset
from prefect_rlhf.placement.models.known_models import known_shape
from prefect_rlhf.placement.models.model import ModelSpec
from prefect_rlhf.placement.plan import EngineKind, Placement, Recompute
from prefect_rlhf.placement.planner.preset_plan import preset_problems
from prefect_rlhf.placement.planner.question import Question, Site
from prefect_rlhf.placement.planner.space.candidates import Candidate, CostContext, fitting_candidates
from prefect_rlhf.placement.planner.space.plan_problem import PlanSpace
from prefect_rlhf.placement.plans.presets import Preset
from prefect_rlhf.placement.schedule.estimate import training
from prefect_rlhf.tasks.rl.settings.offline import DPO
from prefect_rlhf.tasks.rl.settings.online import GRPO, PPO, ReMax
from prefect_rlhf.tasks.settings import Update

WHOLE_EVALUATIONS, PRESET_EVALUATIONS = 1_000_000, 100_000  # of the search: the same on every machine


@dataclass(frozen=True, slots=True)
class Case:
    """One algorithm with models of known shapes on `num_nodes` equal nodes; every row has the same length.

    `batch` counts prompts (of DPO: pairs). `staleness` is that of the algorithm's own parameter. `execution`,
    `recompute` and `engines` say how the paper's system runs calls.
    """

    algorithm: str
    actor: str
    critic: str
    num_nodes: int
    hardware: Hardware
    batch: int
    workload: Workload
    mini_batches: int = 1
    staleness: int = 0
    execution: type[Execution] = Execution
    recompute: Recompute = 0
    engines: tuple[EngineKind, ...] = ("vllm", "megatron")
    _spaces: dict[str, PlanSpace] = field(default_factory=dict, init=False, repr=False, compare=False, hash=False)

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.hardware.devices_per_node

    @property
    def cluster(self) -> ClusterShape:
        """The devices, each with the memory of its datasheet."""
        memory = self.hardware.device.memory_bytes
        return ClusterShape("paper", self.num_nodes, self.hardware.devices_per_node, memory)

    @property
    def sources(self) -> CostSources:
        return CostSources.equal_nodes(self.hardware, self.num_nodes)

    def graph(self) -> DataflowGraph:
        """Trace the flow that runs, without its evaluation calls."""
        flow, settings = _FLOWS[self.algorithm](self)
        names = flow.algorithm.body.__annotations__
        optional = {name: kind.removesuffix(" | None") for name, kind in names.items()}
        models = {role: self._model(role) for role, kind in optional.items() if kind in ("Model", "Reward")}
        data = {name: _DATA[kind](name) for name, kind in names.items() if kind in _DATA}
        arguments: dict[str, Any] = {role: Model(path=role, head=model.head) for role, model in models.items()}
        arguments |= {name: object() for name in data}
        more = {"staleness": self.staleness} if "staleness" in names else {}
        return training(flow.algorithm.trace({**arguments, "algo": settings, **more}, models, data))

    def space(self) -> PlanSpace:
        """Return all plans on the paper's engines; they are counted once."""
        if "all" not in self._spaces:
            site = Site(self.cluster, self.cluster.whole, self.sources)
            context = CostContext.of(Question(self.graph(), site, self.workload), self._execution_of)
            calls = (call for call in context.graph if call.kind != "compute")
            candidates = {call.name: tuple(self._candidates(call, context)) for call in calls}
            self._spaces["all"] = PlanSpace(context, candidates)
        return self._spaces["all"]

    def _execution_of(self, placement: Placement) -> Execution:
        return replace(self.execution.of(placement), recompute=self.recompute)

    def _candidates(self, call: Call, context: CostContext) -> Iterator[Candidate]:
        """Those that fit and stay on their devices; of a call that generates, on the paper's engine."""
        for candidate in fitting_candidates(call, context):
            stays = candidate.placement.offload == "none"
            if stays and (call.kind != "generate" or candidate.placement.engine in self.engines):
                yield candidate

    def searched(self) -> TimedPlan | None:
        """Return the best plan in which nothing is offloaded."""
        return best_with_moves(self.space().most, self.space().context, WHOLE_EVALUATIONS)

    def preset(self, rule: Preset) -> TimedPlan | None:
        """Return the best plan that a preset admits; None where none fits."""
        space = self.space()
        try:
            for problem in preset_problems(rule, self.cluster.whole, space):
                plan = best_with_moves(problem, space.context, PRESET_EVALUATIONS)
                if plan is not None:
                    return plan
        except InvalidInput:
            return None
        return None

    def _model(self, role: str) -> ModelSpec:
        scalar = role in ("critic", "reward")
        shape = known_shape(self.critic if scalar else self.actor)
        return ModelSpec(role, f"/models/{role}", "scalar" if scalar else "lm", shape, "bfloat16")


def _update(case: Case) -> Update:
    return Update(epochs=1, mini_batches=case.mini_batches)


_FLOWS: Mapping[str, Callable[[Case], tuple[Any, Any]]] = {
    "PPO": lambda case: (ppo, PPO(batch_size=case.batch, update=_update(case))),
    "GRPO": lambda case: (grpo, GRPO(batch_size=case.batch, update=_update(case))),
    "ReMax": lambda case: (remax, ReMax(batch_size=case.batch)),
    "DPO": lambda case: (dpo, DPO(batch_size=case.batch, update=_update(case))),
}
_DATA: Mapping[str, Callable[[str], Dataset]] = {
    "Prompts": lambda name: Dataset(name, ("prompt_tokens",), 1 << 20),
    "Preferences": lambda name: Dataset(name, ("tokens", "prompt_length"), 1 << 20, rows_per_item=2),
}
