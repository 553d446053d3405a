"""What holds for all tests of engines."""

import pytest
import torch.distributed as dist


@pytest.fixture(scope="module", autouse=True)
def no_world_is_left():
    """Engines in this process make a world of one rank; other files' tests begin without."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
