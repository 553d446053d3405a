"""How a call is executed, as far as its time and memory depend on it: strategy, span of nodes, cuts, recomputation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from prefect_rlhf.placement.cost.hardware import LinkSpan
from prefect_rlhf.placement.plan import EngineKind, Placement
from prefect_rlhf.placement.strategy import Strategy

ZeroStage = Literal[0, 1, 2, 3]


@dataclass(frozen=True, slots=True)
class EngineRules:
    """How an engine cuts a replica's rows, which tokens reach the head, and what a row costs its host.

    With `portions`, the plan's micro-batches run one after the other, and each is cut again, into `forward_cuts` (in
    training `train_cuts`) pieces per pipeline stage, which fill the pipeline: ReaL (section 4, search space). Without,
    the plan's micro-batches are what fills the pipeline: Megatron. vLLM has no pipeline here: it keeps so much less of
    a replica's rows in flight, and takes up others as some end. `head_on_prompts`: in generation too, where the logits
    of all prompts in flight stay until it ends. `row_step_seconds` is what the host of a replica spends on each of its
    rows at each decoding step, while the devices wait. `sequence_parallel`: where training and inference keep, pass
    over and send [tokens, hidden] outside of matrix products, tp splits it too (Korthikanti et al. 2022, section 4).
    `gradient_bytes`: of an element, while gradients are summed.
    """

    portions: bool
    forward_cuts: int = 1
    train_cuts: int = 2
    head_on_prompts: bool = False
    row_step_seconds: float = 0.0
    sequence_parallel: bool = False
    gradient_bytes: int = 4


MEGATRON = EngineRules(portions=False)
REAL = EngineRules(portions=True, head_on_prompts=True, gradient_bytes=2)
"""Its released code: `generate` holds the prompts' logits, and gradients are in the compute format by default
(github.com/openpsi-project/ReaLHF, impl/model/nn/real_llm_generate.py and impl/model/backend/megatron.py)."""
EARLY_VLLM = EngineRules(portions=False, row_step_seconds=60e-6)
"""vLLM before 0.6, as in HybridFlow's experiments. Its host worked row by row between steps and took 62% of the time of
an 8B model on an H100 (vLLM blog, 5 September 2024); 60 us a row says that of some 250 rows: an estimate."""
HYBRIDFLOW = replace(EARLY_VLLM, sequence_parallel=True)
"""And Megatron with sequence parallelism for all four models, as its code's configuration has it
(github.com/volcengine/verl, trainer/config/ppo_megatron_trainer.yaml)."""


@dataclass(frozen=True, slots=True)
class Execution:
    """One way to run a call on a mesh of `num_nodes` x `devices_per_node` devices.

    `recompute`: training keeps each layer's input only and runs its forward again (full recomputation). `zero` is the
    stage of ZeRO over dp: 1 is the distributed optimizer that runs use; 0, 2 and 3 are for estimates of baselines.
    `rows_at_once`: the most rows of a replica that generation keeps in flight (None: all); more come as others end.
    `engine` is the one whose layers a profile is asked for.
    """

    strategy: Strategy
    num_nodes: int = 1
    devices_per_node: int = 1
    micro_batches: int = 1
    recompute: bool = False
    zero: ZeroStage = 1
    rows_at_once: int | None = None
    rules: EngineRules = MEGATRON
    engine: EngineKind = "megatron"

    @classmethod
    def of(cls, placement: Placement) -> Execution:
        """As the plan says that it runs."""
        mesh = placement.mesh
        whole = cls(placement.strategy, mesh.num_nodes, mesh.devices_per_node, placement.micro_batches)
        return replace(whole, engine=placement.engine)

    def pieces(self, rows: float, train: bool) -> tuple[int, int]:
        """(portions run one after the other, micro-batches in each that fill the pipeline) for so many rows.

        >>> Execution(Strategy(pp=4), micro_batches=2, rules=REAL).pieces(64, train=True)
        (2, 8)
        >>> Execution(Strategy(pp=4), micro_batches=8).pieces(64, train=True)
        (1, 8)
        """
        if self.engine == "vllm":
            return _at_most(self.micro_batches, rows), 1
        if not self.rules.portions:
            return 1, _at_most(self.micro_batches, rows)
        portions = _at_most(self.micro_batches, rows)
        pp = self.strategy.pp
        cuts = 1 if pp == 1 else pp * (self.rules.train_cuts if train else self.rules.forward_cuts)
        return portions, _at_most(cuts, rows / portions)

    @property
    def sequence_split(self) -> int:
        """Into how many parts [tokens, hidden] is split outside of matrix products; vLLM does not split it."""
        return self.strategy.tp if self.rules.sequence_parallel and self.engine == "megatron" else 1

    def tp_group(self) -> CollectiveGroup:
        return self._group(self.strategy.tp, 1)

    def dp_group(self) -> CollectiveGroup:
        return self._group(self.strategy.dp, self.strategy.tp)

    def pp_span(self) -> LinkSpan:
        """Between neighbouring stages."""
        stage = self.strategy.tp * self.strategy.dp
        return "node" if self.strategy.pp * stage <= self.devices_per_node else "network"

    def _group(self, size: int, stride: int) -> CollectiveGroup:
        if size * stride <= self.devices_per_node or self.num_nodes == 1:
            return CollectiveGroup(size, "node", size)
        return CollectiveGroup(size, "network", max(1, self.devices_per_node // stride))


@dataclass(frozen=True, slots=True)
class CollectiveGroup:
    """`size` devices that work on a collective; `per_node` of them share a node, and so its way to the others."""

    size: int
    span: LinkSpan
    per_node: int


def _at_most(count: int, rows: float) -> int:
    return max(1, min(count, int(rows)))
