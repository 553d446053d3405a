"""The ranks of a vLLM engine, as a world of their own inside the world of all ranks.

vLLM assumes a single engine per process, on all ranks of torch's world, in rank order: it builds its groups with
collective calls of the whole world, names them by counting per process, and keeps them in module globals. Here an
engine may have any ordered subset of the ranks, and a process several engines: each has its own values of the module
globals that `OF_AN_ENGINE` names.
"""

import os
import random
import re
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from vllm import envs
from vllm.distributed import parallel_state
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.layers import utils as vllm_layers
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher
from vllm.v1.worker import workspace

from prefect_rlhf.engines.process_groups import ensure_world, name_groups_by_members, shared
from prefect_rlhf.engines.weights.read_peer_memory import NODE

Told = TypeVar("Told")
_GROUPS = tuple(name for name in vars(parallel_state) if re.fullmatch(r"_[A-Z][A-Z_]*", name))
OF_AN_ENGINE: Mapping[tuple[ModuleType, str], Callable[[], Any]] = MappingProxyType(
    dict.fromkeys(((parallel_state, name) for name in _GROUPS), lambda: None)
    | {
        (parallel_state, "_ENABLE_CUSTOM_ALL_REDUCE"): lambda: True,
        # Compiled code looks a group up by its name. With tables of its own, each engine's is `tp:0`.
        (parallel_state, "_groups"): dict,
        (parallel_state, "_group_name_counter"): dict,
        # Engines of equal shape would share the tables of their positions, which an engine offloads with its weights.
        (rotary_embedding, "_ROPE_DICT"): dict,
        (workspace, "_manager"): lambda: None,  # of the engine that is built last
    }
)
"""The module globals of vLLM that hold an engine's state -> makes the value that a new engine begins with."""
_ENTERED = threading.RLock()  # those globals are the process's: copies to the host wait while another engine generates


class RankGroup:
    """The world ranks of an engine, in tensor-parallel order.

    `ident` is the same on all its ranks and differs from any other group's on the machine, whatever else each rank has
    built: it names shared memory.
    """

    def __init__(self, ranks: Sequence[int], rank: int) -> None:
        ensure_world()
        self.ranks = tuple(ranks)
        self.index = self.ranks.index(rank)
        self.ident = _agree_on_ident(self.ranks, rank)
        self._globals = {each: make() for each, make in OF_AN_ENGINE.items()}
        self._told: dist.ProcessGroup | None = None  # made at its first use

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Give vLLM this engine's groups and keep the random state; every call of vLLM must happen inside.

        A single engine of a process at a time, in any thread.
        """
        # vLLM reads its groups from module globals at every step, so two engines of a process cannot run at once. The
        # lock is re-entrant because `building` enters too. It also covers copies to the host, which run in another
        # thread: without it such a copy would see the groups of the engine that generates.
        with _ENTERED:
            outside = _swapped(self._globals)
            try:
                with _random_state_kept():
                    yield
            finally:
                self._globals = _swapped(outside)

    def told(self, values: Sequence[Told] | None) -> Sequence[Told]:
        """Return the values of the first rank on all ranks of the engine; the other ranks pass None. Collective."""
        if len(self.ranks) == 1:
            return values or ()
        if self._told is None:
            ranks = list(self.ranks)
            self._told = dist.new_group(ranks, backend="gloo", use_local_synchronization=True, sort_ranks=False)
        return shared(values, self._told)

    @contextmanager
    def building(self) -> Iterator[type[ExecutorWithExternalLauncher]]:
        """Let vLLM build an engine with the executor class yielded, in a world made of these ranks alone.

        Leaves no trace: thread count, environment variables and everything replaced are as before.
        """
        name_groups_by_members()
        with ExitStack() as stack:
            stack.enter_context(self.entered())
            stack.enter_context(_threads_kept())
            stack.enter_context(_environment_kept())
            for owner, name, value in self._replacements():
                stack.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, value)
            yield self._executor()
            self._unlink_shared_memory()

    def close(self) -> None:
        """End the process groups of the engine. Every rank of it must call this."""
        with self.entered():
            parallel_state.destroy_model_parallel()
            if parallel_state._WORLD is not None:
                parallel_state._WORLD.destroy()
                parallel_state._WORLD = None

    def _replacements(self) -> tuple[tuple[object, str, Any], ...]:
        size = dist.get_world_size
        new_world, new_group = parallel_state.init_world_group, parallel_state.init_model_parallel_group

        def init_world_group(ranks: list[int], *args: Any) -> Any:
            return new_world([self.ranks[i] for i in ranks], *args)

        def init_model_parallel_group(groups: list[list[int]], *args: Any, **options: Any) -> Any:
            # The broadcaster is 25 MB of shared memory per group. An engine with a process per rank never uses it.
            options["use_message_queue_broadcaster"] = False
            return new_group([[self.ranks[i] for i in group] for group in groups], *args, **options)

        # vLLM builds groups with ranks 0..n-1 of "its" world, by collective calls of torch's whole world. The
        # replacements map these numbers to the engine's ranks, and create groups by their members alone
        # (`use_local_synchronization`), because ranks outside this engine do not take part.
        groups = (
            (parallel_state, "init_world_group", init_world_group),
            (parallel_state, "init_model_parallel_group", init_model_parallel_group),
            (dist, "new_group", partial(dist.new_group, use_local_synchronization=True, sort_ranks=False)),
            (dist, "get_world_size", lambda group=None: len(self.ranks) if group is None else size(group)),
        )
        if torch.cuda.is_available():
            return (*groups, *_on_cuda())
        # On CPU a group's name also names its shared memory, which no other engine on the machine may use.
        return (
            *groups,
            (parallel_state, "_get_unique_name", lambda name: f"{name}:{self.ident}"),
            (vllm_layers, "dispatch_cpu_unquantized_gemm", _keep_plain),
            (CpuCommunicator, "_all_group_ranks_share_shm_group_name", _is_on_one_node),
        )

    def _executor(self) -> type[ExecutorWithExternalLauncher]:
        place = f"gang:{self.ident}", self.index, self.index
        if torch.cuda.is_available():
            place = *place[:2], torch.cuda.current_device()

        class RankExecutor(ExecutorWithExternalLauncher):  # type: ignore[misc]  # its base is Any to the type checker
            """vLLM's worker in this very process, at its place in the group."""

            def _distributed_args(self) -> tuple[str, int, int]:
                return place

        return RankExecutor

    def _unlink_shared_memory(self) -> None:
        """Remove the name of the all-reduce buffer: it stays mapped, and a killed rank leaves no file behind."""
        communicator = parallel_state.get_tp_group().device_communicator
        name = getattr(getattr(communicator, "dist_module", None), "group_name", None)
        if name is not None:
            Path(f"/dev/shm/{name}_{self.index}").unlink()


def _swapped(values: Mapping[tuple[ModuleType, str], Any]) -> dict[tuple[ModuleType, str], Any]:
    """Give vLLM's globals these values; return those before."""
    before = {(module, name): getattr(module, name) for module, name in values}
    for (module, name), value in values.items():
        setattr(module, name, value)
    return before


def _on_cuda() -> tuple[tuple[object, str, Any], ...]:
    """Return the replacements for CUDA alone: these modules need a GPU, or time to load."""
    from vllm.v1.worker.gpu import model_runner

    from prefect_rlhf.engines.vllm.stream_sampler import StreamSampler

    return ((model_runner, "Sampler", StreamSampler),)


def _is_on_one_node(communicator: CpuCommunicator) -> bool:
    """Replace vLLM's check of names, always equal here: shared memory connects ranks of the same node only."""
    nodes: list[str | None] = [None] * communicator.world_size
    dist.all_gather_object(nodes, os.environ.get(NODE), group=communicator.device_group)
    return len(set(nodes)) == 1


def _keep_plain(layer: torch.nn.Module, remove_weight: bool) -> None:
    """Stand in for vLLM's packing on CPU, which empties `weight`: see `cpu.kernels`."""
    del remove_weight
    vars(layer)["cpu_linear"] = torch.nn.functional.linear


def _agree_on_ident(ranks: tuple[int, ...], rank: int) -> str:
    """Agree on a name through the world's store, which also counts how often each rank has built on these ranks."""
    # The same ranks may build several engines, so the key needs a number. Each rank counts its own builds: all ranks
    # build in the same order, so equal counts mean the same engine, without a barrier. `get` waits for the first rank.
    store = distributed_c10d._get_default_store()
    key = "vllm " + " ".join(map(str, ranks))
    key = f"{key} #{store.add(f'{key} of {rank}', 1)}"
    if rank == ranks[0]:
        store.set(key, uuid.uuid4().hex[:12])
    return store.get(key).decode()


@contextmanager
def _random_state_kept() -> Iterator[None]:
    state, array_state = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(state)
            np.random.set_state(array_state)


@contextmanager
def _threads_kept() -> Iterator[None]:
    """Restore `torch.set_num_threads`, which vLLM's CPU worker disables."""
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(num_threads)


@contextmanager
def _environment_kept() -> Iterator[None]:
    """Restore the environment: vLLM's CPU platform sets LD_PRELOAD and more, for processes it does not start here.

    On CUDA, compiled code is kept apart for each device, because it contains the device's number. vLLM keeps it by rank
    in the engine, and engines on several devices have a rank 0.
    """
    before = dict(os.environ)
    if torch.cuda.is_available():
        os.environ["VLLM_CACHE_ROOT"] = f"{envs.VLLM_CACHE_ROOT}/device_{torch.cuda.current_device()}"
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
