"""Which attention kernel the Megatron engine gets on CUDA, by the conditions of torch 2.13 (sdp_utils.cpp).

`engines/megatron/fused.py` excludes cuDNN's kernel. Flash attention supports neither masks nor float32, and the
memory-efficient kernel does not support keys shared by several query heads. In all other cases torch computes the
scores of all token pairs.
"""

from typing import Literal

from prefect_rlhf.placement.models.model import Dtype, TransformerShape

AttentionKernel = Literal["flash attention", "memory-efficient attention", "scores of all pairs of tokens"]
WIDEST_FLASH_HEAD = 256


def attention_kernel(shape: TransformerShape, dtype: Dtype) -> AttentionKernel:
    """Return the kernel for the rows of a forward and backward pass; a layer with a window uses memory-efficient
    attention.

    A head's width is even, and flash attention pads it to a multiple of 8. Cards of 24 to 48 GB (compute capability 8.6
    and 8.9, and 12) cannot train heads 194 to 224 wide with flash attention.
    """
    if dtype == "bfloat16" and shape.head_dim <= WIDEST_FLASH_HEAD:
        return "flash attention"
    multiple = 8 if dtype == "bfloat16" else 4  # 16 bytes
    if shape.num_kv_heads == shape.num_attention_heads and shape.head_dim % multiple == 0:
        return "memory-efficient attention"
    return "scores of all pairs of tokens"
