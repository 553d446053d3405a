"""A flow on its share of a machine's GPUs. It knows of no other flow."""

import os
import time

from prefect import flow, task


@task(log_prints=True)
def work(seconds: float) -> str:
    """Put your own work here: torch, JAX or a program that you start see the GPUs of this run alone."""
    devices = os.environ["GPU_MESH_DEVICES"]
    print(f"runs on {devices}")
    time.sleep(seconds)
    return devices


@flow
def crunch(seconds: float = 10.0) -> str:
    """Return the numbers of the devices that this run had."""
    return work(seconds)
