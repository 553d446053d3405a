"""Differences between the releases of Megatron-core that a run accepts: 0.16.1, which is pinned, and 0.19.2.

All other code uses what both have. The engine's traits name the releases, and ADR 68 says how they were compared.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.models.gpt import gpt_model
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.package_info import MAJOR, MINOR
from megatron.core.pipeline_parallel.fine_grained_activation_offload import FineGrainedActivationOffloadingInterface
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from torch import Tensor

IS_NEW = (MAJOR, MINOR) >= (0, 19)
"""Whether the installed release is 0.19."""
_NORM_GRADIENTS = "get_grads_for_grad_norm" if IS_NEW else "get_main_grads_for_grad_norm"


def feed_forward_parts(layer_parts: Any) -> Any:
    """Return the submodules of the feed-forward part in a layer's spec: its two linear layers and its activation.

    0.16 has them in a spec, 0.19 in the arguments of a function that makes the part.
    """
    made_by = layer_parts.mlp
    return made_by.keywords["submodules"] if isinstance(made_by, partial) else made_by.submodules


def mark_split(parameter: Tensor, axis: int) -> None:
    """Mark a weight that tp splits along `axis`. Without initialization 0.16 does not, and 0.19 has done so already."""
    if not hasattr(parameter, "tensor_model_parallel"):
        set_tensor_model_parallel_attributes(parameter, True, axis, 1)


def norm_gradients(optimizer: Any) -> list[Tensor]:
    """Return this rank's gradients that count in the norm, from a part of Megatron's chain of optimizers."""
    gradients: list[Tensor] = getattr(optimizer, _NORM_GRADIENTS)()
    return gradients


def change_norm_gradients(optimizer: Any, change: Callable[[list[Tensor]], list[Tensor]]) -> None:
    """Let a part of Megatron's chain of optimizers return changed gradients for the norm."""
    original = getattr(optimizer, _NORM_GRADIENTS)
    setattr(optimizer, _NORM_GRADIENTS, lambda: change(original()))


def buffer_layout(
    parameters: Sequence[torch.nn.Parameter], config: DistributedDataParallelConfig, replicas: int
) -> dict[str, Any]:
    """Return the argument of DistributedDataParallel that says where trained parameters lie in its buffers.

    Without it 0.19 computes the same layout, with a warning from every rank. 0.16 has no such argument. All of a
    format lie in a single bucket, because gradients are summed after the last of them.
    """
    if not IS_NEW:
        return {}
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return {"full_param_layout": DistributedOptimizer.compute_full_param_layout(trained, None, replicas, config)}


def let_go_of_inputs(layer: Any) -> None:
    """Make a layer of 0.19 let go of the feed-forward part's input once its norm has read it.

    0.19 holds that tensor until the end of the layer's forward pass. A recomputation ends earlier, as soon as it has
    what the backward pass needs. So every recomputed layer held all activations of its attention until the next step,
    and a train_step that recomputes everything took 2.4 times the bytes. 0.16 holds nothing.
    """
    if IS_NEW:
        layer.off_interface = _LettingGo


class _LettingGo(FineGrainedActivationOffloadingInterface):  # type: ignore[misc]
    """Megatron's offload of activations, which we leave off, without a reference to the tensor after its use."""

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.tensor = None


def silence_advice() -> None:
    """Keep 0.19's advice to use another class than GPTModel out of each rank's log; 0.16 has no such class."""
    if IS_NEW:
        logging.getLogger(gpt_model.__name__).setLevel(logging.ERROR)
