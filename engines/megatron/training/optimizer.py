"""Megatron's optimizer: sharded over data-parallel replicas, with float32 main weights, one step at a time."""

import math
from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from megatron.core import optimizer as megatron_optimizer
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate
from torch import Tensor

from prefect_rlhf.engines.engine import Shard, StatePart
from prefect_rlhf.engines.megatron.core_versions import norm_gradients
from prefect_rlhf.engines.megatron.cpu import adamw as cpu_adamw
from prefect_rlhf.engines.megatron.cpu import shim as cpu_shim
from prefect_rlhf.engines.megatron.groups import Groups, only
from prefect_rlhf.engines.megatron.training.key_value_copies import KeyValueCopies
from prefect_rlhf.engines.megatron.training.learning_rate import rate_share
from prefect_rlhf.engines.megatron.training.optimizer_state import MOMENTS, state_parts
from prefect_rlhf.errors.errors import EngineFailed, NotFinite
from prefect_rlhf.placement.models.model import OptimizerSpec


class MainOptimizer:
    """AdamW on this rank's share of the main weights, with a learning rate schedule and clipping to a global norm."""

    def __init__(
        self, model: DistributedDataParallel, spec: OptimizerSpec, groups: Groups, copies: KeyValueCopies | None = None
    ) -> None:
        self._spec = spec
        self._model = model
        self._steps = 0
        megatron_optimizer.USING_PYTORCH_OPTIMIZER = True  # Transformer Engine's and Apex's Adam never read grad_scale
        with cpu_shim.cuda_type_names(), only(groups.mesh):
            self._chain = get_megatron_optimizer(
                _config(spec, model),
                [model],
                config_overrides=_overrides(spec),
                use_gloo_process_groups=False,
                pg_collection=groups.collection,
            )
        for part in self._chain.chained_optimizers:
            if type(part.optimizer) is not torch.optim.AdamW:
                kind = type(part.optimizer)
                raise EngineFailed(
                    f"Megatron took {kind.__module__}.{kind.__name__}: only torch's AdamW scales and clips"
                )
            if copies is not None:
                copies.count_once(part)
        for group in self._chain.param_groups:
            group["fused"] = True  # a single pass over memory instead of about ten

    def step(self) -> float:
        """Clip the gradient and update; return its norm before clipping, which is 0 only if every element is 0.

        Raises NotFinite, on every rank, if the gradient is not finite; the weights are then unchanged.
        """
        self._set_rates()
        with cpu_shim.cuda_type_names():
            self._chain.prepare_grads()
            norm = self._norm()
            if not math.isfinite(norm):
                raise NotFinite(f"the gradient's norm is {norm}: some loss or gradient is not a finite number")
            clip = min(1.0, self._spec.max_grad_norm / (norm + 1e-6))
            self._update(clip)
        return norm

    def _update(self, clip: float) -> None:
        """Take AdamW's step with gradients times `clip`; round the main weights, and gather other replicas' weights."""
        if not torch.cuda.is_available():
            for part in self._chain.chained_optimizers:
                cpu_adamw.step(part, clip)
            self._model.start_param_sync()
            return
        for part in self._chain.chained_optimizers:
            # fused AdamW divides gradients by this on its way, which saves Megatron's own pass over them
            device = part.optimizer.param_groups[0]["params"][0].device
            part.optimizer.grad_scale = torch.full((), 1 / clip, device=device)
        self._chain.step_with_ready_grads()

    def reload_main_weights(self) -> None:
        """Copy the compute weights to the main weights, after they were written from outside."""
        with cpu_shim.cuda_type_names():
            self._chain.reload_model_params()

    @property
    def num_updates(self) -> int:
        """How many steps were taken so far."""
        return self._steps

    @property
    def learning_rate(self) -> float:
        """The learning rate of the latest step; a scalar head's may differ."""
        return self._spec.lr * rate_share(self._spec, self._steps)

    def state_parts(self, shards: Mapping[str, Shard]) -> Iterator[StatePart]:
        """See TrainingEngine.state_parts; `shards` are this rank's weights."""
        for part in self._chain.chained_optimizers:
            yield from state_parts(part, shards)

    def begin_after(self, num_updates: int) -> None:
        """See TrainingEngine.begin_after. The moments are as AdamW creates them at its first step."""
        self._steps = num_updates
        for part in self._chain.chained_optimizers if num_updates else ():
            for main in (main for group in part.optimizer.param_groups for main in group["params"]):
                state = {str(kind): torch.zeros_like(main) for kind in MOMENTS}
                part.optimizer.state[main] = state | {"step": torch.tensor(float(num_updates), device=main.device)}

    def tensors(self) -> Iterator[Tensor]:
        """Yield main weights and moments. They may be created (at the first step) while a thread counts bytes, hence
        lists.
        """
        for part in self._chain.chained_optimizers:
            for group in part.optimizer.param_groups:
                yield from group["params"]
            for state in list(part.optimizer.state.values()):
                yield from (value for value in list(state.values()) if isinstance(value, Tensor))

    def _norm(self) -> float:
        """Return the gradient's norm over all shards and replicas; Megatron's own waits for the device at each."""
        parts = self._chain.chained_optimizers
        gradients = [gradient for part in parts for gradient in norm_gradients(part)]
        nothing = torch.zeros((), device=next(self._model.parameters()).device)
        norms = torch._foreach_norm(gradients) if gradients else (nothing,)
        norm = self._root_of_sum(torch.linalg.vector_norm(torch.stack(norms)) ** 2)
        if norm == 0:  # squares below 1e-45 are 0 in float32; every rank has the same norm, so all take this branch
            squares = [torch.linalg.vector_norm(gradient, dtype=torch.double) ** 2 for gradient in gradients]
            norm = self._root_of_sum(sum(squares, nothing.double()))
        return norm

    def _root_of_sum(self, squared: Tensor) -> float:
        """Return the root of a sum of squares over all shards and replicas. Collective."""
        dist.all_reduce(squared, group=self._chain.get_grad_stats_parallel_group())
        root: float = float(squared) ** 0.5
        return root

    def _set_rates(self) -> None:
        """Set the rates of the next step; norms and biases do not decay."""
        self._steps += 1
        share = rate_share(self._spec, self._steps)
        for group in self._chain.param_groups:
            group["lr"] = group["max_lr"] * share
            group["weight_decay"] = self._spec.weight_decay * group["wd_mult"]


def _config(spec: OptimizerSpec, model: DistributedDataParallel) -> OptimizerConfig:
    return OptimizerConfig(
        optimizer="adam",
        lr=spec.lr,
        min_lr=0.0,
        adam_beta1=spec.betas[0],
        adam_beta2=spec.betas[1],
        adam_eps=spec.eps,
        weight_decay=spec.weight_decay,
        clip_grad=spec.max_grad_norm,
        bf16=model.config.bf16,
        params_dtype=model.config.params_dtype,
        use_distributed_optimizer=True,
    )


def _overrides(spec: OptimizerSpec) -> dict[ParamKey, dict[str, float]]:
    flat = ParamPredicate(name="one_dimensional", fn=lambda parameter: parameter.dim() == 1)
    overrides = {ParamKey(predicate=flat): {"wd_mult": 0.0}}
    if spec.head_lr is not None:
        overrides[ParamKey(attr="is_scalar_head")] = {"max_lr": spec.head_lr}
    return overrides
