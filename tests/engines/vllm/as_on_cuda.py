"""A process in which vLLM takes its CUDA platform without a GPU; it prints what it makes of our settings, as JSON.

An H100 is claimed, with Triton and FlashInfer, so that vLLM chooses what it would choose there.
"""

import contextlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import vllm.config.vllm as vllm_config
from vllm import envs
from vllm.distributed import parallel_state
from vllm.platforms.interface import DeviceCapability
from vllm.utils import flashinfer
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher
from vllm.v1.worker.gpu import model_runner
from vllm_cases import MAX_LENGTH, build_command

from prefect_rlhf.engines.process_groups import ensure_world
from prefect_rlhf.engines.vllm.environment import settle
from prefect_rlhf.engines.vllm.group import RankGroup
from prefect_rlhf.engines.vllm.settings import engine_arguments
from prefect_rlhf.placement.cost.paged_cache import whole_cache_bytes
from prefect_rlhf.placement.cost.sizes import ModelSizes
from prefect_rlhf.placement.devices.mesh import DeviceMesh
from prefect_rlhf.tasks.profiling.bench import Bench, Sizes

sys.modules["vllm._C_stable_libtorch"] = ModuleType("vllm._C_stable_libtorch")  # kernels, which the CPU's wheel lacks
from vllm.platforms.cuda import CudaPlatformBase  # noqa: E402

FORKED: list[int] = []  # devices whose generators were restored


class H100(CudaPlatformBase):
    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
        return DeviceCapability(9, 0)

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return "NVIDIA H100 80GB HBM3"

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return 80 << 30

    def is_cumem_allocator_available(self) -> bool:
        return True


def claim_a_gpu() -> None:
    """Only now, because modules of vLLM that were imported on CUDA would load its kernels."""
    torch.cuda.is_available = lambda: True
    torch.cuda.current_device = lambda: 3
    torch.cuda.get_rng_state = lambda device: torch.tensor(device)
    torch.cuda.set_rng_state = lambda _, device: FORKED.append(device)
    for module in [each for each in sys.modules.values() if each.__name__.startswith("vllm")]:
        if "current_platform" in vars(module):
            module.current_platform = H100()
    sys.modules["vllm.platforms"]._current_platform = H100()
    vllm_config.HAS_TRITON = True
    flashinfer.has_flashinfer = lambda: True
    settle()


def configuration(command: Any, ranks: tuple[int, ...]) -> dict[str, Any]:
    """What vLLM configures for an engine on these ranks."""
    config = engine_arguments(command, ranks, ExecutorWithExternalLauncher).create_engine_config()
    return {
        "runner V2": config.use_v2_model_runner,
        "sleeps": config.model_config.enable_sleep_mode,
        "cumem": config.model_config.enable_cumem_allocator,
        "eager": config.model_config.enforce_eager,
        "fuses all-reduce": config.compilation_config.pass_config.fuse_allreduce_rms,
        "custom all-reduce": not config.parallel_config.disable_custom_all_reduce,
        "rows": config.scheduler_config.max_num_seqs,
        "tokens of a pass": config.scheduler_config.max_num_batched_tokens,
    }


class Asked:
    """A gang that keeps the commands of builds."""

    size = 1

    def __init__(self) -> None:
        self.commands: list[Any] = []

    def call(self, method: Any, arguments: Any, **_: Any) -> dict[int, None]:
        self.commands += [command for (command,) in arguments.values()]
        return dict.fromkeys(arguments)


def profiled(command: Any, device: Any, engine: Any) -> Any:
    """The command by which `rlhf/profile` builds an engine for its measurements."""
    gang = Asked()
    bench = Bench(gang, command.model, DeviceMesh(0, 1, 0, 1), print, device)  # type: ignore[arg-type]
    bench.build(engine, Sizes(2, 16))
    return gang.commands[0]


def building() -> dict[str, Any]:
    """What an engine finds while it is built on device 3."""
    before = model_runner.Sampler
    with RankGroup((0,), 0).building():
        parallel_state._TP = SimpleNamespace(device_communicator=None)
        names = [parallel_state._get_unique_name("tp") for _ in range(2)]
        seen = {"names": names, "cache": envs.VLLM_CACHE_ROOT, "sampler": model_runner.Sampler.__name__}
    return {**seen, "restored": model_runner.Sampler is before, "forked": FORKED}


def main(folder: str) -> None:
    ensure_world()
    claim_a_gpu()
    command, pair = build_command(folder), build_command(folder, ranks=(0, 1), tp=2)
    cache_bytes = whole_cache_bytes(4, MAX_LENGTH, ModelSizes.of(command.model), 1)
    with contextlib.redirect_stdout(sys.stderr):
        seen = {
            "alone": configuration(command, (0,)),
            "offloaded": configuration(replace(command, is_offloaded=True), (0,)),
            "eager": configuration(replace(command, cuda_graphs=False), (0,)),
            "pair": configuration(pair, (0, 1)),
            "descending": configuration(pair, (1, 0)),
            "many rows": configuration(replace(command, max_rows=10_000), (0,)),
            "small cache": configuration(replace(command, max_rows=10_000, cache_bytes=cache_bytes), (0,)),
            "profiled": configuration(profiled(command, "cuda", "vllm"), (0,)),
            "profiled graphs": [
                profiled(command, *where).cuda_graphs for where in (("cuda", "megatron"), ("cpu", "vllm"))
            ],
            "building": building(),
            "FlashInfer": envs.VLLM_ALLREDUCE_USE_FLASHINFER,
        }
    Path(sys.argv[2]).write_text(json.dumps(seen))


if __name__ == "__main__":
    main(sys.argv[1])
