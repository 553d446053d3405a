"""The kernel of attention on CUDA follows from format, width of a head and shared keys."""

from dataclasses import replace

import pytest

from prefect_rlhf.placement.models.attention_kernel import attention_kernel
from prefect_rlhf.placement.models.model import TransformerShape

SHARED = TransformerShape(512, 1024, 2, 8, 2, 64, 512, 128, 1e4, 1e-5, True)


@pytest.mark.parametrize(
    ("changes", "dtype", "kernel"),
    [
        ({}, "bfloat16", "flash attention"),
        ({"num_kv_heads": 8}, "bfloat16", "flash attention"),
        ({"head_dim": 256}, "bfloat16", "flash attention"),
        ({"head_dim": 288}, "bfloat16", "scores of all pairs of tokens"),
        ({"head_dim": 288, "num_kv_heads": 8}, "bfloat16", "memory-efficient attention"),
        ({}, "float32", "scores of all pairs of tokens"),
        ({"num_kv_heads": 8}, "float32", "memory-efficient attention"),
        ({"num_kv_heads": 8, "head_dim": 66}, "float32", "scores of all pairs of tokens"),
    ],
)
def test_a_kernel_is_used_if_its_conditions_hold(changes, dtype, kernel):
    assert attention_kernel(replace(SHARED, **changes), dtype) == kernel
