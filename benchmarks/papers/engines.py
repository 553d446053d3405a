"""How the engines of published systems run a call, where they do it differently from ours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from prefect_rlhf.placement.cost.datasheets.collectives import all_reduce_seconds, share_seconds
from prefect_rlhf.placement.cost.execution import Execution, Tokens, at_most
from prefect_rlhf.placement.cost.times.layer_times import LayerTimes


@final
@dataclass(frozen=True, slots=True)
class RealExecution(Execution):
    """ReaL: micro-batches that are cut again, a head that sees prompts, gradients in the compute format.

    Its released code: `generate` holds the prompts' logits, and gradients are in the compute format by default
    (github.com/openpsi-project/ReaLHF, impl/model/nn/real_llm_generate.py and impl/model/backend/megatron.py).
    """

    gradient_bytes: ClassVar[int] = 2

    @property
    def replays_graphs(self) -> bool:
        """It decodes with CUDA graphs where the workload says so (section 8.2, table 6)."""
        return True

    def pieces(self, rows: float, train: bool) -> tuple[int, int]:
        """Run the plan's micro-batches one after the other, each cut to fill the pipeline (section 4, search space).

        Training cuts it into two pieces for each pipeline stage, anything else into one.

        >>> from prefect_rlhf.placement.devices.strategy import Strategy
        >>> RealExecution(Strategy(pp=4), micro_batches=2).pieces(64, train=True)
        (2, 8)
        """
        portions, pp = at_most(self.micro_batches, rows), self.strategy.pp
        cuts = 1 if pp == 1 else pp * (2 if train else 1)
        return portions, at_most(cuts, rows / portions)

    def head_tokens(self, prompt: Tokens, response: Tokens) -> Tokens:
        """All tokens of a row, in generation too, where the logits of all prompts in flight stay until it ends."""
        return prompt + response

    def logit_bytes(self, logits: int, at_once: int, item_bytes: int) -> int:
        """All logits at once (section 8, footnote 1), and a float32 copy of them."""
        return logits * (item_bytes + 4)

    def replicas_seconds(self, num_parameters: int, times: LayerTimes) -> float:
        """Seconds to sum gradients and to give every replica the new weights, both in the compute format."""
        group = self.dp_group()
        summed = share_seconds(num_parameters * self.gradient_bytes, group, times.links)
        return summed + share_seconds(num_parameters * times.sizes.item, group, times.links)


@final
@dataclass(frozen=True, slots=True)
class MegatronLmExecution(Execution):
    """Megatron-LM in 2021: stages send what tp splits, gradients are summed in 16 bits.

    Narayanan et al. 2021, section 4.1 (scatter/gather), and the defaults of its code with `--fp16`.
    """

    gradient_bytes: ClassVar[int] = 2

    @property
    def boundary_split(self) -> int:
        """Each device sends its part, and the devices of the next stage gather them over their own links."""
        return self.strategy.tp

    def replicas_seconds(self, num_parameters: int, times: LayerTimes) -> float:
        """Seconds of an all-reduce of gradients: as long as both halves of it; every replica steps for itself."""
        return all_reduce_seconds(num_parameters * self.gradient_bytes, self.dp_group(), times.links)


@dataclass(frozen=True, slots=True)
class EarlyVllmExecution(Execution):
    """vLLM before 0.6, as in HybridFlow's experiments: its host works row by row between decoding steps.

    That took 62% of the time of an 8B model on an H100 (vLLM blog, 5 September 2024); 60 us a row says that of some 250
    rows: an estimate.
    """

    row_step_seconds: ClassVar[float] = 60e-6


@final
@dataclass(frozen=True, slots=True)
class HybridFlowExecution(EarlyVllmExecution):
    """Early vLLM, and Megatron with sequence parallelism for all four models.

    Its code's configuration (github.com/volcengine/verl, trainer/config/ppo_megatron_trainer.yaml).
    """

    @property
    def sequence_split(self) -> int:
        """Tensor parallelism also splits what is kept, passed over and sent (Korthikanti et al. 2022, section 4)."""
        return self.strategy.tp if self.engine == "megatron" else 1
