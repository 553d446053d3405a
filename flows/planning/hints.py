"""Hints about the question itself: properties that slow down every plan for it."""

from prefect_rlhf.placement.planner.question import Question


def uneven_batch(question: Question) -> str | None:
    """Return a hint with better batch sizes if a training call's rows do not divide evenly over a node's devices.

    None if they divide, and for batches of less than a row per device and mini-batch.
    """
    devices = 1 << (question.site.cluster.devices_per_node.bit_length() - 1)  # strategies divide by powers of two
    for call in question.graph:
        even = call.mini_batches * call.rows_per_item * devices
        if call.kind != "train_step" or call.every is not None or call.num_rows % even == 0 or call.num_rows < even:
            continue
        less = call.num_rows // even * even
        parts = f" in {call.mini_batches} mini-batches" if call.mini_batches > 1 else ""
        return (
            f"hint: {call.num_rows} rows{parts} do not divide evenly over {devices} devices, so replicas wait for the "
            f"fullest; {less} or {less + even} do"
        )
    return None
