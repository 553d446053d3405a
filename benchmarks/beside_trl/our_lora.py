"""Our side of `lora_step.py`: the GRPO step with a reference, of an adapter or of all weights, and its bytes.

Beside the step time it reports what the run's devices held, what the certificate allowed, and what a reallocation sent.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from benchmarks.beside_trl import our_grpo
from benchmarks.beside_trl.lora_work import LoraWork
from benchmarks.beside_trl.our_step import measured, train
from benchmarks.beside_trl.step_work import Measured
from benchmarks.learn.resident_bytes import resident_bytes
from prefect_rlhf.tasks.running.journal import read_spans


def flow_parameters(work: LoraWork, folder: Path) -> dict[str, Any]:
    """Return the parameters of `our_grpo`, with a reference and, with a rank, an adapter."""
    given = our_grpo.flow_parameters(work, folder)
    actor = {"path": work.model, **({"adapter": {"rank": work.rank}} if work.rank else {})}
    kl = {"coefficient": work.kl_coefficient}
    return {**given, "actor": actor, "ref": {"path": work.model}, "algo": {**given["algo"], "kl": kl}}


def with_bytes(work: LoraWork, run_dir: Path) -> Measured:
    """Add to the measured step: bytes on the devices as reported and as certified, and bytes of one reallocation."""
    spans = list(read_spans(run_dir))
    most: dict[str, int] = {}
    for span in spans:
        for rank, num_bytes in span.device_bytes.items():
            most[rank] = max(most.get(rank, 0), num_bytes)
    moves = [span.bytes_moved for span in spans if span.kind == "reallocate"]
    step = measured(work, run_dir)
    certified = resident_bytes("grpo", flow_parameters(work, run_dir.resolve().parent))
    found = {"device_bytes": sum(most.values()), "certified_bytes": certified, "reallocation_bytes": max(moves)}
    adapter = {"adapter_bytes": stored_bytes(run_dir / "actor" / "adapter_model.safetensors")} if work.rank else {}
    return replace(step, details={**step.details, **found, **adapter})


def stored_bytes(file: Path) -> int:
    """Return the bytes of the tensors in a file, which is an export of the adapter in the dtype that it computes in."""
    return sum(tensor.nbytes for tensor in load_file(file).values())


if __name__ == "__main__":
    asked = LoraWork(**json.loads(sys.argv[1]))
    train("grpo", asked, lambda folder: flow_parameters(asked, folder), with_bytes)
