"""Columns with a vector per token: padding, lengths, and the way back."""

import pytest
import torch

from prefect_rlhf.engines.rows import Batch, pad, unpad

pytestmark = pytest.mark.quick


def test_vectors_of_tokens_are_padded_and_found_again():
    rows = [torch.rand(3, 2), torch.rand(0, 2), torch.rand(1, 2)]
    batch = Batch({"top_logprobs": rows})
    assert batch["top_logprobs"].shape == (3, 3, 2)
    assert batch.mask("top_logprobs").tolist() == [[1, 1, 1], [0, 0, 0], [1, 0, 0]]
    for found, row in zip(unpad(batch["top_logprobs"], [3, 0, 1]), rows, strict=True):
        assert torch.equal(found, row)


def test_a_number_per_row_is_a_single_value():
    assert Batch({"scores": [torch.tensor(1.0)] * 2}).mask("scores").tolist() == [[1.0], [1.0]]


def test_numbers_and_vectors_keep_their_format():
    assert pad([torch.ones(1, 2, dtype=torch.int16)]).dtype == torch.int16
