"""A GPU's copies in host memory pin exactly their bytes, once, and unpin them at the end (D5)."""

import gc
from types import SimpleNamespace

import pytest
import torch

from prefect_rlhf.engines.weights.offload import HostLink
from prefect_rlhf.engines.weights.pinned_memory import PinnedMemory
from prefect_rlhf.errors.errors import OutOfDeviceMemory
from tests.support.pretend_gpu import DEVICE, pretend_gpu

ODD = (5 << 20) + 3  # torch's pinned allocator would take 8 MiB


def test_a_link_pins_exactly_its_bytes_once_and_never_two_buffers():
    with pretend_gpu() as gpu:
        link = HostLink(DEVICE)
        room = link.room(ODD)
        assert gpu.registered == {room.data_ptr(): ODD} and len(room) == ODD
        assert link.room(7).data_ptr() == room.data_ptr() and len(gpu.registered) == 1
        room.fill_(3)
        larger = link.room(2 * ODD)
        assert gpu.registered == {larger.data_ptr(): 2 * ODD}
        assert int(room.sum(dtype=torch.int64)) == 3 * ODD  # a reader of the old buffer still has it
        link.close()
        assert not gpu.registered
        link.close()


def test_unused_memory_is_unpinned():
    with pretend_gpu() as gpu:
        link = HostLink(DEVICE)
        link.room(ODD)
        del link
        gc.collect()
        assert not gpu.registered


def test_unpinnable_memory_gives_one_line(monkeypatch):
    refusing = SimpleNamespace(cudaHostRegister=lambda *_: 2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: refusing)
    with pytest.raises(OutOfDeviceMemory, match=r"^the host cannot pin 5\.00 MiB: CUDA error 2$"):
        PinnedMemory(ODD)


def test_missing_host_memory_gives_one_line():
    with pretend_gpu(), pytest.raises(OutOfDeviceMemory, match=r"^the host has no 1073741824\.00 GiB left: "):
        HostLink(DEVICE).room(1 << 60)
