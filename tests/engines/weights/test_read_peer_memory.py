"""Memory of another process: any blocks are read into any other blocks, and what cannot be read is said."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prefect_rlhf.engines.weights import read_peer_memory
from prefect_rlhf.engines.weights.read_peer_memory import _calls, _copy, _host, _segments, _table

sides = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(0, 5)), max_size=6)


def blocks(shapes, total):
    """Views of rows with a gap between them, as many bytes as `total` in all, and some that are whole."""
    made, left = [], total
    for rows, columns, gap in shapes:
        if rows * columns <= left:
            made.append(torch.zeros(rows, columns + gap, dtype=torch.uint8)[:, :columns])
            left -= rows * columns
    return [*made, torch.zeros(left, dtype=torch.uint8)] if left else made


@given(sides, sides, st.integers(1, 300), st.integers(1, 8), st.integers(1, 40))
def test_blocks_are_read_into_blocks_of_another_shape(source, target, total, most_segments, most_bytes):
    """In the order of their rows, however few segments a call takes; the gaps stay as they are."""
    read, written = blocks(source, total), blocks(target, total)
    for block in read:
        block.copy_(torch.randint(1, 256, block.shape, dtype=torch.uint8))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(read_peer_memory, "MOST_SEGMENTS", most_segments)
        patch.setattr(read_peer_memory, "MOST_BYTES", most_bytes)
        for remote, local in _calls(_segments(_table(read)), _segments(_table(written))):
            assert max(len(remote), len(local)) <= most_segments
            assert _copy(os.getpid(), remote, local)
    assert torch.equal(torch.cat([block.flatten() for block in read]), torch.cat([b.flatten() for b in written]))
    assert all(int(block._base.sum()) == int(block.sum()) for block in written if block._base is not None)


def test_a_process_that_has_ended_is_named():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    here = np.array([[torch.zeros(8).data_ptr(), 8]])
    with pytest.raises(OSError, match=f"No such process: reading weights from process {ended.pid}"):
        _copy(ended.pid, here, here)


def test_a_host_is_the_same_for_all_its_processes():
    line = "from prefect_rlhf.engines.weights.read_peer_memory import _host; print(_host())"
    told = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True, check=True, timeout=60)
    assert int(told.stdout) == _host() != os.getpid()
