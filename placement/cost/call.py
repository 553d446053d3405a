"""Seconds of a model function call under a way to execute it.

Every kind of call is layers of one stage, times micro-batches, plus the pipeline around them: with m micro-batches of
which the slowest stage takes t, a portion takes m * t, and once around the other stages (Narayanan et al. 2021,
section 2.2). The last stage has the head on top of its layers, so it may be the slowest.
"""

from __future__ import annotations

from prefect_rlhf.placement.cost.collectives import CollectiveGroup
from prefect_rlhf.placement.cost.execution import Execution
from prefect_rlhf.placement.cost.layer_times import LayerTimes
from prefect_rlhf.placement.cost.seconds import Seconds
from prefect_rlhf.placement.cost.workload import CallWork


def call_cost(work: CallWork, execution: Execution, times: LayerTimes) -> Seconds:
    """Seconds of one call, by what takes them.

    Raises InvalidInput where the execution spans nodes that no network connects.
    """
    cost = {"generate": _generate, "inference": _inference, "train_step": _train}[work.kind]
    return cost(work, execution, times) + Seconds(call=times.fixed(work.kind) + _around(work, execution, times))


def _around(work: CallWork, execution: Execution, times: LayerTimes) -> float:
    """What new weights cost: a train_step's their fingerprint, a generate that is the first to use them their packing.

    Whoever moves weights to a generate pays for their fingerprint there.
    """
    if work.kind == "train_step":
        return times.written(_fullest_stage(execution, times))
    return times.packed(_fullest_stage(execution, times)) if work.kind == "generate" else 0.0


def _inference(work: CallWork, execution: Execution, times: LayerTimes) -> Seconds:
    rows, length = work.rows / execution.strategy.dp, work.workload.mean_length
    portions, pieces = execution.pieces(rows, train=False)
    each = rows / portions / pieces
    layer, hop = _forward(each, length, execution, times), _to_next_stage(each * length, execution, times)
    head = times.head_forward(each * _head_tokens(work, execution), execution.strategy.tp)
    return _pipelined(layer, hop, head, pieces, execution, times).times(portions)


def _train(work: CallWork, execution: Execution, times: LayerTimes) -> Seconds:
    """`epochs` * `mini_batches` optimizer steps, each over its micro-batches, forward and backward."""
    tp, steps = execution.strategy.tp, work.epochs * work.mini_batches
    rows, length = work.rows / work.mini_batches / execution.strategy.dp, work.workload.mean_length
    portions, pieces = execution.pieces(rows, train=True)
    each = rows / portions / pieces
    tokens = each * _head_tokens(work, execution)
    layer = _forward(each, length, execution, times) + _backward(each, length, execution, times)
    hops = _to_next_stage(each * length, execution, times).times(2)
    head = times.head_forward(tokens, tp) + times.head_backward(tokens, tp)
    step = _pipelined(layer, hops, head, pieces, execution, times).times(portions)
    return (step + _update(execution, times)).times(steps)


def _generate(work: CallWork, execution: Execution, times: LayerTimes) -> Seconds:
    """Prefill of all prompts, then one step per token for the rows that are still being generated."""
    workload, rows = work.workload, work.rows / execution.strategy.dp
    portions, pieces = execution.pieces(rows, train=False)
    waves = portions * max(1.0, rows / portions / (execution.rows_at_once or rows))
    each = rows / waves / pieces
    layer = _forward(each, workload.prompts.mean, execution, times)
    hop = _to_next_stage(each * workload.prompts.mean, execution, times)
    cost = _pipelined(layer, hop, times.sample(each, execution.strategy.tp), pieces, execution, times)
    for first, end, running in workload.responses.still_running():
        context = workload.prompts.mean + (first + end) / 2
        cost = cost + _decode_step(each * running, context, pieces, work, execution, times).times(end - first)
    return cost.times(waves)


def _decode_step(
    rows: float, context: float, pieces: int, work: CallWork, execution: Execution, times: LayerTimes
) -> Seconds:
    """One token for each of `pieces` micro-batches of `rows`, which follow each other around the pipeline.

    With too few of them to keep every stage busy, each waits for its own token to come around.
    """
    tp = execution.strategy.tp
    layer = times.decode(rows, context, tp, work.workload.cuda_graphs) + _tp_reduces(rows, 2, execution, times)
    hop = _to_next_stage(rows, execution, times)
    slowest, around = _stages(layer, hop, times.sample(rows, tp), execution, times)
    idle = max(0.0, around - pieces * slowest.total)
    host = pieces * rows * execution.row_step_seconds
    return slowest.times(pieces) + Seconds(launch=host, pipeline_bubble=idle)


def _pipelined(
    layer: Seconds, hop: Seconds, head: Seconds, pieces: int, execution: Execution, times: LayerTimes
) -> Seconds:
    """`pieces` micro-batches through all stages; `layer`, `hop` and `head` are of one of them."""
    slowest, around = _stages(layer, hop, head, execution, times)
    return slowest.times(pieces) + Seconds(pipeline_bubble=around - slowest.total)


def _stages(
    layer: Seconds, hop: Seconds, head: Seconds, execution: Execution, times: LayerTimes
) -> tuple[Seconds, float]:
    """(time of the slowest stage, seconds of one micro-batch through all stages)."""
    pp, sizes = execution.strategy.pp, times.sizes
    last = layer.times(sizes.stage_layers(pp, pp - 1)) + head
    if pp == 1:
        return last, last.total
    first, last = layer.times(sizes.stage_layers(pp)) + hop, last + hop
    return max(first, last, key=lambda stage: stage.total), (pp - 1) * first.total + last.total


def _forward(rows: float, length: float, execution: Execution, times: LayerTimes) -> Seconds:
    """One layer, with its two all-reduces."""
    layer = times.forward(rows, length, execution.strategy.tp, execution.sequence_split)
    return layer + _tp_reduces(rows * length, 2, execution, times)


def _backward(rows: float, length: float, execution: Execution, times: LayerTimes) -> Seconds:
    """One layer. Full recomputation runs its forward once more, all-reduces included (Chen et al. 2016)."""
    layer = times.backward(rows, length, execution.strategy.tp, execution.sequence_split)
    layer = layer + _tp_reduces(rows * length, 2, execution, times)
    return layer + _forward(rows, length, execution, times) if execution.recompute else layer


def _update(execution: Execution, times: LayerTimes) -> Seconds:
    """Sum gradients over replicas, step, and give every replica the new weights (ZeRO 1: Rajbhandari et al. 2020)."""
    parameters = _fullest_stage(execution, times)
    shared = execution.replicas_seconds(parameters, times) + _tied_embedding_sum(execution, times)
    return Seconds(dp_communication=shared, optimizer=times.adam(parameters / execution.strategy.dp))


def _tied_embedding_sum(execution: Execution, times: LayerTimes) -> float:
    """The first stage and the last each have a copy of a tied embedding, whose gradients they add up (Megatron)."""
    strategy, sizes = execution.strategy, times.sizes
    if strategy.pp == 1 or not sizes.tied or sizes.head != "lm":
        return 0.0
    num_bytes = sizes.table / strategy.tp * execution.gradient_bytes
    return times.all_reduce(num_bytes, CollectiveGroup(2, execution.pp_span(), 1))


def _fullest_stage(execution: Execution, times: LayerTimes) -> int:
    strategy = execution.strategy
    return max(times.sizes.stage_parameters(strategy, stage) for stage in {0, strategy.pp - 1})


def _tp_reduces(tokens: float, count: int, execution: Execution, times: LayerTimes) -> Seconds:
    """`count` all-reduces of [tokens, hidden] over the tensor-parallel group."""
    if execution.strategy.tp == 1:
        return Seconds()
    num_bytes = tokens * times.sizes.hidden * times.sizes.item
    return Seconds(tp_communication=count * times.all_reduce(num_bytes, execution.tp_group()))


def _to_next_stage(tokens: float, execution: Execution, times: LayerTimes) -> Seconds:
    if execution.strategy.pp == 1:
        return Seconds()
    num_bytes = tokens * times.sizes.hidden * times.sizes.item / execution.sequence_split
    return Seconds(pp_communication=times.links.seconds(num_bytes, execution.pp_span()))


def _head_tokens(work: CallWork, execution: Execution) -> float:
    """Tokens of a row that reach the head, on average."""
    return execution.head_tokens(work.workload.prompts.mean, work.workload.responses.mean)
