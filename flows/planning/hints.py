"""Hints of an answer: what about the question itself makes every plan for it worse than it need be."""

from __future__ import annotations

from prefect_rlhf.placement.planner.question import Question


def uneven_batch(question: Question) -> str | None:
    """Say which numbers of rows would divide over a node's devices, where those of a training call do not.

    None where they do, and for a batch of fewer than a row a device and mini-batch.
    """
    devices = 1 << (question.site.cluster.devices_per_node.bit_length() - 1)  # strategies divide by powers of two
    for call in question.graph:
        even = call.mini_batches * call.rows_per_item * devices
        if call.kind != "train_step" or call.every is not None or call.num_rows % even == 0 or call.num_rows < even:
            continue
        less = call.num_rows // even * even
        parts = f" in {call.mini_batches} mini-batches" if call.mini_batches > 1 else ""
        return (
            f"hint: {call.num_rows} rows{parts} do not divide over {devices} devices, and replicas wait for the "
            f"fullest; {less} or {less + even} would"
        )
    return None
