"""What holds for all tests of engines."""

import pytest
import torch
import torch.distributed as dist
from megatron_world import World


@pytest.fixture(autouse=True)
def one_thread():
    """A sum has the same bits on every machine, and the bytes of threads are not counted with an engine's."""
    torch.set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def no_world_is_left():
    """Engines in this process make a world of one rank; other files' tests begin without."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    """Four ranks with engines, which take seconds to start."""
    world = World(4, str(tmp_path_factory.mktemp("world")))
    yield world
    world.close()
