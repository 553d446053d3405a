"""The allocations that torch makes during a call, on this process or on a rank."""

import json
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import megatron_cases as cases
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves

from prefect_rlhf.engines.engine import Sequences

SECONDS = 30


def make_rows(count: int, length: int) -> tuple[Sequences, dict[str, torch.Tensor]]:
    """Rows of one length, half of it the response."""
    tokens = torch.randint(1, cases.VOCAB, (count, length))
    sequences = Sequences(tokens, torch.full((count,), length // 2), torch.full((count,), length))
    mask = sequences.response_mask_BT()
    return sequences, {"mask": mask, "advantages": torch.randn(mask.shape)}


def peak_allocated(function, path) -> int:
    """The most bytes that were allocated at once while `function` ran, less those that were there before.

    A collective of gloo runs in a thread of gloo while its caller waits, and frees the buffers that it allocates. The
    profiler loses some of these frees, a changing number, so what other threads allocate ends with the caller's wait:
    at the caller's next allocation or free.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    profiler.export_chrome_trace(str(path))
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("name") == "[memory]"]
    own: dict[int, int] = {}
    others: dict[int, int] = {}
    peak = 0
    for event in sorted(events, key=lambda event: event["ts"]):
        address, num_bytes = event["args"]["Addr"], event["args"]["Bytes"]
        is_own = event["tid"] == threading.get_native_id()
        if is_own:
            others.clear()
        if num_bytes > 0:
            (own if is_own else others)[address] = num_bytes
            peak = max(peak, sum(own.values()) + sum(others.values()))
        else:
            (own if address in own else others).pop(address, None)
    return peak


class _Ended:
    """The handle of a collective that has ended."""

    def wait(self, *_) -> bool:
        return True


@contextmanager
def prompt_collectives():
    """Let every collective end, and gloo forget its tensors, before its caller goes on.

    A thread of gloo forgets them a moment after the collective has ended, later on a busy machine. If nobody else has
    them then, they count as allocated for that long, or for ever if the profiler loses the free.
    """
    names = ("allreduce", "allgather", "_allgather_base", "_reduce_scatter_base", "broadcast")
    of_group = {name: vars(dist.ProcessGroup)[name] for name in names}

    def prompt(name):
        def call(group, *arguments, **options):
            given = [each for each in tree_leaves([arguments, options]) if isinstance(each, torch.Tensor)]
            storages = [tensor.untyped_storage() for tensor in given]
            before = [_references(storage) for storage in storages]
            of_group[name].__get__(group)(*arguments, **options).wait()
            deadline = time.monotonic() + SECONDS
            while any(_references(storage) > old for storage, old in zip(storages, before, strict=True)):
                assert time.monotonic() < deadline, "gloo keeps tensors of a collective that has ended"
                time.sleep(0)
            return _Ended()

        return call

    def reduce_scatter(group, output, given, options):
        """Sum a copy of the input and take this rank's part, as gloo does with a copy that nobody else sees."""
        summed, of_sum = given.clone(), dist.AllreduceOptions()
        of_sum.reduceOp = options.reduceOp
        group.allreduce([summed], of_sum).wait()
        output.copy_(summed.chunk(group.size())[group.rank()].view_as(output))
        return _Ended()

    for name in names:
        setattr(dist.ProcessGroup, name, reduce_scatter if name == "_reduce_scatter_base" else prompt(name))
    try:
        yield
    finally:
        for name, method in of_group.items():
            setattr(dist.ProcessGroup, name, method)


def _references(storage: torch.UntypedStorage) -> int:
    return torch._C._storage_Use_Count(storage._cdata)


def train_peak(rank: int, case: cases.Case, settings: cases.Walk, rows: int, length: int, folder: str) -> int:
    """The most bytes that a second train_step of a rank allocates at once."""
    engine = case.build(rank)
    torch.manual_seed(0)  # every shard has the same rows
    cases.train_on(engine, *make_rows(2, 8), cases.loss, settings)  # the moments are made in the first step
    sequences, batch = make_rows(rows, length)
    with prompt_collectives():
        return peak_allocated(
            lambda: cases.train_on(engine, sequences, batch, cases.loss, settings), Path(folder, f"{rank}.json")
        )
