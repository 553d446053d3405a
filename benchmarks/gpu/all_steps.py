"""All steps in the order of a morning: the cheapest that decide most come first."""

from benchmarks.gpu.attention import STEPS_OF_ATTENTION
from benchmarks.gpu.bits import STEPS_OF_BITS
from benchmarks.gpu.commands import STEPS_OF_COMMANDS
from benchmarks.gpu.engine import STEPS_OF_ENGINE
from benchmarks.gpu.host_link import STEPS_OF_HOST_LINK
from benchmarks.gpu.memory import STEPS_OF_MEMORY
from benchmarks.gpu.nccl import STEPS_OF_NCCL
from benchmarks.gpu.processes import STEPS_OF_PROCESSES
from benchmarks.gpu.runs import STEPS_OF_A_GPU, STEPS_OF_RUNS
from benchmarks.gpu.sampling import STEPS_OF_SAMPLING
from benchmarks.gpu.sleeping import STEPS_OF_SLEEPING
from benchmarks.gpu.speed import STEPS_OF_SPEED
from benchmarks.gpu.step import Step

ONE_GPU: tuple[Step, ...] = tuple(
    sorted(
        (
            *STEPS_OF_ENGINE,
            *STEPS_OF_ATTENTION,
            *STEPS_OF_MEMORY,
            *STEPS_OF_SPEED,
            *STEPS_OF_HOST_LINK,
            *STEPS_OF_BITS,
            *STEPS_OF_PROCESSES,
            *STEPS_OF_SAMPLING,
            *STEPS_OF_SLEEPING,
            *STEPS_OF_COMMANDS,
            *STEPS_OF_A_GPU,
        ),
        key=lambda step: step.command,
    )
)
ALL_GPUS: tuple[Step, ...] = (*STEPS_OF_NCCL, *STEPS_OF_RUNS)


def preload() -> None:
    """Import everything that steps on the pretend GPU need, before they are forked."""
    import tests.engines.megatron_cases
    import tests.support.pretend_gpu  # noqa: F401
