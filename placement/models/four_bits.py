"""Sizes of NF4 with double quantisation (QLoRA, Dettmers et al. 2023, section 3), in bitsandbytes' form.

A matrix [out, in] is cut into blocks of 64 numbers, row by row. A number has four bits, a block has an 8-bit scale, and
256 such scales share a float32 scale. Another float32 is the mean of the blocks' scales.
"""

BLOCK = 64
SCALES = 256
"""How many blocks' scales have a scale in common."""
AT_ONCE = 1 << 22
"""How many numbers are dequantised at once; their temporary tensors take six bytes each, and 40 for each block."""


def nested_scales(num_blocks: int) -> int:
    """Return how many float32 numbers a matrix has: the scales of its blocks' scales, and their mean.

    >>> nested_scales(1), nested_scales(256), nested_scales(257)
    (2, 2, 3)
    """
    return -(-num_blocks // SCALES) + 1


def cuts_a_block(inputs: int, tp: int) -> bool:
    """Whether splitting a matrix's columns over tp devices would cut a block."""
    return inputs % (BLOCK * tp) != 0
