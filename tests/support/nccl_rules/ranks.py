"""Imported by a rank, or by the process that forks it, before all else: check its calls, and take GPU ranks' branches.

The branches are those of communication only; engines compute as on CPU.
"""

import torch
from megatron.core.distributed import DistributedDataParallel

from prefect_rlhf.engines.megatron import groups
from prefect_rlhf.engines.megatron.training import gradient_buffers
from prefect_rlhf.engines.rank import rank
from prefect_rlhf.engines.rank.profiling import profiling_rank
from prefect_rlhf.engines.weights import move_weights, read_peer_memory
from tests.support.nccl_rules.calls import exempted, open_communicators

rank.exchange_rows = exempted(rank.exchange_rows)
groups.open_communicators = open_communicators
gradient_buffers.GlooGradientBuffers = DistributedDataParallel
torch.cuda.current_stream = lambda *_: None  # Megatron-core 0.19 asks for it before it sums gradients
for module in (move_weights, read_peer_memory, profiling_rank):
    module.uses_nccl = lambda tensor: True
