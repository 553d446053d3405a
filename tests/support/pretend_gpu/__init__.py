"""A GPU that does not exist: its tensors say `cuda:0`, lie in host memory, and are computed by the CPU's kernels.

Within `pretend_gpu()` torch reports a GPU, so the code for CUDA runs: fused kernels, Megatron's own data parallelism,
streams. Its tensors refuse to mix with tensors of the host, in the backward pass too. Each wait of the host for the
device is counted by the line of code that waits. Results in float32 differ from the CPU's by some units of rounding,
as a GPU's do, and two runs on it are equal bit for bit. Limits: it computes with the CPU's kernels, streams run in
order, and collectives go through gloo.
"""

from tests.support.pretend_gpu.cuda import PretendGpu, pretend_gpu
from tests.support.pretend_gpu.tensor import DEVICE, GpuTensor

__all__ = ["DEVICE", "GpuTensor", "PretendGpu", "pretend_gpu"]
