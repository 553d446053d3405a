"""Numbers of the engines that time estimates and the memory certificate use too, in a single place.

Formats are bytes of an element; limits are in the unit that their line states.
"""

from collections.abc import Mapping
from types import MappingProxyType

from prefect_rlhf.placement.models.model import Dtype

ITEM_BYTES: Mapping[Dtype, int] = MappingProxyType({"float32": 4, "bfloat16": 2})
"""Bytes of one weight in a compute format."""
GRADIENT_BYTES = 4  # gradients are summed, in a buffer and over replicas, in float32
MAIN_WEIGHT_BYTES = 4  # the optimizer's float32 copy of weights that compute in bfloat16
ADAM_BYTES = 8  # two float32 moments
TOKEN_BYTES = 8  # token ids are int64
COLUMN_BYTES = 4  # log-probabilities, values, advantages and the like are float32

BUCKET_BYTES = 64 << 20  # bytes of weights that a rank stages at once for sending, and as many for receiving
LOGITS_AT_ONCE_CPU = 1 << 19  # logits that the head makes at a time: about what stays in a core's cache
LOGITS_AT_ONCE_CUDA = 1 << 28  # a GPU needs more of them at a time
LONGEST_EXPLICIT = 512  # tokens; up to here attention's backward on CPU makes all scores of a row, 2-5 times faster
CACHE_BLOCK = 32  # tokens per block of vLLM's key-value cache on CPU; the smaller blocks on CUDA fit in
PASS_TOKENS = 8192  # tokens of a forward pass over prompts, in vLLM and in our sampler
