"""A model's adapter in vLLM: the single slot of its LoRA layers, which is written in place as all weights are.

vLLM would load a PEFT folder, multiply B by the scale, and copy it into a slot. Here the slot begins with zeros under a
name that every request has, no folder is ever loaded into it, and the scale is an argument of the product.

Shapes: T tokens, I inputs and O outputs of a matrix, r rank of the adapter, R rank of the slot.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from vllm.lora import model_manager
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.lora.request import LoRARequest

from prefect_rlhf.engines.cpu_products import added_product, product
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.engine_traits import TRAITS, slot_rank
from prefect_rlhf.placement.models.adapter import AdapterSpec

NUMBER = 1
"""vLLM's number of the adapter. Its number 0 is no adapter."""
REQUEST = LoRARequest(lora_name="adapter", lora_int_id=NUMBER, lora_path="written in place")
SLOTS = ("lora_a_stacked", "lora_b_stacked")
"""The attributes of a LoRA layer with its slots: a tensor [1, 1, R, I] or [1, 1, O, R] for each matrix it fuses."""


def adapter_arguments(adapter: AdapterSpec | None) -> dict[str, Any]:
    """Return the arguments of an engine whose model has this adapter, and no slot for another.

    Raises InvalidInput for a rank above vLLM's largest.
    """
    if adapter is None:
        return {}
    rank = slot_rank("vllm", adapter.rank)
    if rank is None:
        raise InvalidInput("adapter.rank", adapter.rank, f"at most {TRAITS['vllm'].adapter_ranks[-1]} with engine vllm")
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": rank,
        "lora_target_modules": list(adapter.matrices),
    }


@contextmanager
def scaled_products(adapter: AdapterSpec | None) -> Iterator[None]:
    """Build an engine within this, so that its LoRA layers multiply by the adapter's scale.

    On CUDA a build captures its graphs, scale included.
    """
    made: Callable[..., Any] = model_manager.get_punica_wrapper

    def scaled(*arguments: Any, **options: Any) -> Any:
        wrapper = made(*arguments, **options)
        assert adapter is not None  # otherwise no layer has an adapter
        products = wrapper.add_lora_linear if torch.cuda.is_available() else partial(add_products, adapter.rank)
        wrapper.add_lora_linear = partial(_with_scale, products, adapter.scale)
        return wrapper

    model_manager.get_punica_wrapper = scaled
    try:
        yield
    finally:
        model_manager.get_punica_wrapper = made


def _with_scale(
    products: Callable[..., Any],
    scale: float,
    y: Tensor,
    x: Tensor,
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    of_layer: float,
    *rest: Any,
    **options: Any,
) -> Any:
    return products(y, x, a, b, of_layer * scale, *rest, **options)


def add_products(
    rank: int,
    y_TO: Tensor,
    x_TI: Tensor,
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    scale: float,
    widths: Sequence[int],
    **_: Any,
) -> None:
    """Add scale * (x A^T) B^T to each matrix's columns of y: the product on CPU, of the adapter's rank alone.

    vLLM's own copies A and B for every token, since each token may have another adapter.
    """
    first = 0
    for a_11RI, b_11OR, width in zip(a, b, widths, strict=True):
        x_Tr = product(x_TI, a_11RI[0, 0, :rank].T)
        columns = y_TO[:, first : first + width]
        columns.copy_(added_product(columns, x_Tr, b_11OR[0, 0, :, :rank].T, scale))
        first += width


def occupy(runner: Any) -> LoRARequest:
    """Give the adapter the single slot for good, filled with zeros; return the request that every prompt carries."""
    runner.lora_manager.add_dummy_lora(REQUEST, rank=1)
    runner.lora_manager.pin_adapter(NUMBER)
    return REQUEST


def slots(model: nn.Module) -> list[Tensor]:
    """Return all slots of a model."""
    layers = [module for module in model.modules() if isinstance(module, BaseLayerWithLoRA)]
    return [slot for layer in layers for name in SLOTS for slot in getattr(layer, name)]
