"""Rank processes of one gloo world for a test: forked from a server that has imported everything, with a deadline."""

import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

SECONDS = 120


def run_world(size: int, run: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call `run(rank, *arguments)` on every rank of a new world; their results, or the first error."""
    os.environ["OMP_NUM_THREADS"] = "1"  # for the fork server, whose imports must start no threads
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["prefect_rlhf.engines.vllm.engine", "vllm.v1.worker.cpu_worker", "transformers"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    answers = context.Queue()
    ranks = [context.Process(target=_rank, args=(r, size, port, answers, run, arguments)) for r in range(size)]
    for process in ranks:
        process.start()
    try:
        return _collect(answers, size)
    finally:
        for process in ranks:
            process.kill()
            process.join()


def _collect(answers: Any, size: int) -> list[Any]:
    deadline, results = time.monotonic() + SECONDS, {}
    while len(results) < size:
        rank, result, error = answers.get(timeout=max(0.1, deadline - time.monotonic()))
        assert error is None, f"rank {rank}: {error}"
        results[rank] = result
    return [results[rank] for rank in range(size)]


def _rank(rank: int, size: int, port: int, answers: Any, run: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        url, patience = f"tcp://127.0.0.1:{port}", timedelta(seconds=SECONDS)
        dist.init_process_group("gloo", init_method=url, rank=rank, world_size=size, timeout=patience)
        answers.put((rank, run(rank, *arguments), None))
    except Exception:  # noqa: BLE001  the test fails with it
        answers.put((rank, None, traceback.format_exc()))
    time.sleep(SECONDS)  # the world stays whole until every rank has answered; then this process is killed
