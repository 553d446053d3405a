"""Rank processes of one gloo world that stay alive over many tests: any subset of them can be given work."""

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import count
from typing import Any

import torch
import torch.distributed as dist

SECONDS = 120


class World:
    """`size` ranks. `run` calls a module-level function on some of them; the others stay idle."""

    def __init__(self, size: int, directory: str) -> None:
        os.environ["OMP_NUM_THREADS"] = "1"
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["prefect_rlhf.engines.megatron.engine"])
        self._pipes, self._processes = [], []
        self._numbers = count()
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, f"file://{directory}/world", rank, size), daemon=True
            )
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, ranks: Sequence[int], function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Results of `function(rank, *arguments)`, in the order of `ranks`; fails when one fails or takes too long."""
        number = next(self._numbers)
        for rank in ranks:
            self._pipes[rank].send((number, function, arguments))
        deadline, results = time.monotonic() + SECONDS, []
        for rank in ranks:
            answered = None
            while answered != number:  # a test that failed leaves answers that nobody has read
                assert self._pipes[rank].poll(max(0.1, deadline - time.monotonic())), f"rank {rank} is silent"
                answered, result, error = self._pipes[rank].recv()
            assert error is None, f"rank {rank}: {error}"
            results.append(result)
        return results

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def _serve(pipe: Any, url: str, rank: int, size: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=url, rank=rank, world_size=size, timeout=timedelta(seconds=SECONDS))
    while True:
        number, function, arguments = pipe.recv()
        try:
            answer = number, function(rank, *arguments), None
        except Exception:  # noqa: BLE001  the test fails with it
            answer = number, None, traceback.format_exc()
        pipe.send(answer)
