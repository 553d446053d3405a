"""The engines' constants that time estimates and the memory certificate also use, in one place.

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
PLAY_BYTES = 3  # of a token of a play: its mask and the number of its turn
COLUMN_BYTES = 4  # log-probabilities, values, advantages and the like are float32
EXPERT_IMBALANCE = 1.5  # tokens of the fullest device over the mean, where devices divide experts: an assumption

BUCKET_BYTES = 64 << 20  # bytes of weights that a rank stages at once for sending, and as many for receiving
FOLLOWED_ELEMENTS = 16 << 20  # elements of whole weights that a follower averages at a time, or a single larger weight
LOGITS_AT_ONCE_CPU = 1 << 19  # logits that the head makes at a time: about what stays in a core's cache
LOGITS_AT_ONCE_CUDA = 1 << 28  # a GPU needs more of them at a time
LONGEST_EXPLICIT = 512  # tokens; up to here attention's backward on CPU makes all scores of a row, 2-5 times faster
CACHE_BLOCK = 32  # tokens per block of vLLM's key-value cache on CPU; the smaller blocks on CUDA fit in
LEAST_WINDOW_BLOCK, MOST_WINDOW_BLOCK = 256, 1024  # tokens: see window_block
PASS_TOKENS = 8192  # tokens of a forward pass over prompts, in vLLM and in our sampler


def window_block(window: int) -> tuple[int, int]:
    """Return how many tokens attend to a window in one block on CUDA, and how many keys come before the block.

    Blocks are as long as the window, within limits: shorter blocks mean more calls, longer blocks larger masks. Keys
    begin at a multiple of 16, since torch copies masks that do not.

    >>> window_block(5), window_block(1024), window_block(4096)
    ((256, 16), (1024, 1024), (1024, 4096))
    """
    multiple = 16
    reach = -(-window // multiple) * multiple
    return min(max(reach, LEAST_WINDOW_BLOCK), MOST_WINDOW_BLOCK), reach
