"""How long a model function call takes under a given execution.

Every kind of call is a stage's layers, times micro-batches, plus the pipeline around them. With m micro-batches that
take t on the slowest stage, a portion takes m * t plus a pass through the other stages (Narayanan et al. 2021, section
2.2). The last stage has the head in addition to its layers, so it may be the slowest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from operator import add

from prefect_rlhf.placement.cost.datasheets.collectives import CollectiveGroup, all_to_all_seconds
from prefect_rlhf.placement.cost.execution import Execution
from prefect_rlhf.placement.cost.paged_cache import in_flight, mean_context
from prefect_rlhf.placement.cost.seconds import Seconds
from prefect_rlhf.placement.cost.times.layer_times import LayerTimes
from prefect_rlhf.placement.cost.workload import CallWork
from prefect_rlhf.placement.engine_traits import TRAITS
from prefect_rlhf.placement.graph import PlayBounds
from prefect_rlhf.placement.models.engine_constants import CACHE_BLOCK
from prefect_rlhf.placement.plan import Recompute, recomputed_layers

_NOTHING = Seconds()


def call_cost(work: CallWork, execution: Execution, times: LayerTimes) -> Seconds:
    """Return the call's time in seconds, by cause.

    A train_step includes the fingerprint of its new weights; the first generate that uses them, or its first part,
    includes their packing; a move of weights to a generate includes their fingerprint there. Raises InvalidInput if the
    execution spans nodes without a network between them.
    """
    if work.kind == "train_step":
        return train_step_costs(work, execution, times, (execution.recompute,))[0]
    seconds, new_weights = _of_rows(_CallSeconds(work, execution, times).of_a_replica()), 0.0
    if work.kind == "generate" and work.new_weights and not times.sizes.adapter:  # only a base is packed
        new_weights = times.packed(times.sizes.fullest_stage_parameters(execution.strategy))
    return seconds + Seconds(call=times.fixed(work.kind) + new_weights)


def train_step_costs(
    work: CallWork, execution: Execution, times: LayerTimes, recomputes: Sequence[Recompute]
) -> list[Seconds]:
    """Return a train_step's `call_cost` for each number of recomputed layers in `recomputes`."""
    once = Seconds(call=times.fixed(work.kind) + times.written(times.sizes.most_trained(execution.strategy)))
    return [seconds + once for seconds in _CallSeconds(work, execution, times).train(recomputes)]


@lru_cache(maxsize=1 << 15)  # meshes of many sizes give a replica the same rows
def _of_rows(call: _CallSeconds) -> Seconds:
    return call.generate() if call.work.kind == "generate" else call.inference()


@lru_cache(maxsize=1 << 12)
def _with_rows(work: CallWork, rows: int) -> CallWork:
    return replace(work, rows=rows, new_weights=True)


@lru_cache(maxsize=1 << 14)
def _on_a_replica(execution: Execution) -> Execution:
    """The execution on the fewest replicas whose stages and groups are joined by the same links."""
    strategy, per_node = execution.strategy, execution.devices_per_node
    if type(execution) is not Execution or strategy.ep > 1:  # other systems, and experts, may use all replicas
        return execution
    of_replica = strategy.replica_devices
    dp = 1 if (of_replica <= per_node) == (strategy.num_devices <= per_node) else per_node // of_replica + 1
    alone = replace(strategy, dp=dp)
    return replace(execution, strategy=alone, num_nodes=min(2, execution.num_nodes))


@lru_cache(maxsize=1024)  # the same for all micro-batches
def _update(execution: Execution, times: LayerTimes) -> Seconds:
    """Sum gradients over replicas, step, and give every replica the new weights (ZeRO 1: Rajbhandari et al. 2020).

    Of experts, those replicas that hold the same.
    The first stage and the last each have a copy of a tied embedding, whose gradients they add up (Megatron).
    """
    strategy, sizes = execution.strategy, times.sizes
    stage, tied = sizes.fullest_stage(strategy), 0.0
    experts = sizes.stage_trained_experts(strategy, stage)
    trained = sizes.stage_trained(strategy, stage) if sizes.adapter is None else sizes.most_trained(strategy)
    parameters = trained - experts
    if strategy.pp > 1 and sizes.tied and "lm" in sizes.head and not sizes.adapter:
        num_bytes = sizes.table / strategy.tp * execution.gradient_bytes
        tied = times.all_reduce(num_bytes, CollectiveGroup(2, execution.pp_span(), 1))
    shared = execution.replicas_seconds(parameters, times) + tied
    if experts:
        shared += times.share(experts, execution.same_experts_group())
    stepped = parameters / strategy.dp + experts * strategy.ep / strategy.dp
    return Seconds(dp_communication=shared, optimizer=times.adam(stepped))


@dataclass(frozen=True, slots=True)
class _CallSeconds:
    """The formulas of a call's kinds. `rows` are per micro-batch, `length` and `context` are tokens of a row."""

    work: CallWork
    execution: Execution
    times: LayerTimes

    def of_a_replica(self) -> _CallSeconds:
        """The same time of a generate or an inference, as a key that most meshes have in common."""
        execution = _on_a_replica(self.execution)
        rows = self.work.replica_rows(self.execution.strategy.dp) * execution.strategy.dp
        return _CallSeconds(_with_rows(self.work, rows), execution, self.times)

    def inference(self) -> Seconds:
        rows, length = self.work.replica_rows(self.execution.strategy.dp), self.work.workload.mean_length
        portions, pieces = self.execution.pieces(rows // self.work.rows_per_item, train=False)
        each = rows / portions / pieces
        head = self.times.head_forward(each * self._head_tokens, self.execution.strategy.tp)
        head = head.times(self.work.vocabulary_passes)
        once = self._pipelined(self._forward(each, length), self._to_next_stage(each * length), head, pieces)
        return once.times(portions)

    def train(self, recomputes: Sequence[Recompute]) -> list[Seconds]:
        """Take `epochs` * `mini_batches` optimizer steps, each over the micro-batches of every row set.

        Returns the seconds for each number of recomputed layers.
        """
        by_part = [
            (self if part is self.work else replace(self, work=part))._there_and_back(recomputes)
            for part in (self.work.by_row_set if self.work.others else (self.work,))
        ]
        uncut = replace(self.execution, micro_batches=1, recompute=0, tokens_over_tp=False)
        update, steps = _update(uncut, self.times), self.work.epochs * self.work.mini_batches
        return [(reduce(add, passes, Seconds()) + update).times(steps) for passes in zip(*by_part, strict=True)]

    def _there_and_back(self, recomputes: Sequence[Recompute]) -> list[Seconds]:
        """Go forward and backward over the micro-batches of a mini-batch, for each number of recomputed layers."""
        work = self.work
        rows = work.mini_batch_rows(self.execution.strategy.dp)
        portions, pieces = self.execution.pieces(rows // work.rows_per_item, train=True)
        each = rows / portions / pieces
        layer, hops, heads, again = self.micro_batch(each)
        return [
            self._pipelined(layer, hops, heads, pieces, again, recompute).times(portions) for recompute in recomputes
        ]

    def micro_batch(self, rows: float) -> tuple[Seconds, Seconds, Seconds, Seconds]:
        """Return a micro-batch's time in training, in seconds: a layer, hops, heads, and only a layer's forward."""
        length, tp = self.work.workload.mean_length, self.execution.strategy.tp
        tokens, again = rows * self._head_tokens, self._forward(rows, length)
        head = self.times.head_forward(tokens, tp) + self.times.head_backward(tokens, tp)
        hops = self._to_next_stage(rows * length).times(2)
        return again + self._backward(rows, length), hops, head.times(self.work.vocabulary_passes), again

    def generate(self) -> Seconds:
        """Prefill all prompts, then take a step per token for the unfinished rows.

        Rows without room in the cache begin when other rows end.
        """
        workload, rows = self.work.workload, self.work.replica_rows(self.execution.strategy.dp)
        portions, pieces = self.execution.pieces(rows // self.work.rows_per_item, train=False)
        rows_of_portion = rows / portions
        at_once = in_flight(
            rows_of_portion, self.execution.cache_bytes, workload, self.times.sizes, self.execution.strategy.tp
        )
        each = at_once.first / pieces
        layer, hop = self._forward(each, workload.prompts.mean), self._to_next_stage(each * workload.prompts.mean)
        seconds = self._pipelined(layer, hop, self.times.sample(each, self.execution.strategy.tp), pieces)
        decoding = Seconds()
        for first, end, running in workload.responses.still_running():
            context = workload.prompts.mean + (first + end) / 2
            decoding = decoding + self._decode_step(each * running, context, pieces).times(end - first)
        seconds = seconds + decoding.times(self._said_share)
        if rows_of_portion > at_once.first:
            seconds = seconds + self._in_turn(rows_of_portion - at_once.first, at_once.later)
        if self.work.play is not None:
            seconds = seconds + self._between_turns(each, pieces, self.work.play)
        return seconds.times(portions)

    @property
    def _said_share(self) -> float:
        """The share of a row's tokens after its prompt that the model says; an environment writes the others."""
        play, responses = self.work.play, self.work.workload.responses.mean
        return 1.0 if play is None else max(0.0, 1 - play.observed / max(1.0, responses))

    def _between_turns(self, rows: float, pieces: int, play: PlayBounds) -> Seconds:
        """Wait for the environments of a row that ends last, and prefill what they wrote.

        In rounds, each turn after the first computes the keys and values of all tokens so far. Otherwise a turn also
        computes half a block of the cache again, on average.
        """
        workload, further = self.work.workload, play.turns - 1
        if TRAITS[self.execution.engine].plays_in_rounds:
            tokens = further * (workload.prompts.mean + workload.responses.mean / 2)
        else:
            tokens = play.observed + further * CACHE_BLOCK / 2
        layer, hop = self._forward(rows, tokens), self._to_next_stage(rows * tokens)
        prefill = self._pipelined(layer, hop, self.times.sample(rows, self.execution.strategy.tp), pieces)
        return prefill + Seconds(environment=play.wait_seconds)

    def _in_turn(self, rows: float, at_once: float) -> Seconds:
        """Generate `rows` that begin as others end, `at_once` of them in flight.

        Prompts fill the space of a finished row at once. As rows grow, some lose their blocks and compute them again:
        in all, at most as many tokens as the row had.
        """
        workload, tp = self.work.workload, self.execution.strategy.tp
        layer, hop = self._forward(rows, workload.mean_length), self._to_next_stage(rows * workload.mean_length)
        prefill = self._pipelined(layer, hop, self.times.sample(rows, tp), 1)
        context = mean_context(workload)
        return prefill + self._decode_step(at_once, context, 1).times(rows * workload.responses.mean / at_once)

    def _decode_step(self, rows: float, context: float, pieces: int) -> Seconds:
        """Make a token for each of `pieces` micro-batches of `rows`, which follow each other around the pipeline.

        If there are too few micro-batches to keep every stage busy, each waits for its own token. The devices wait
        while the host prepares the next step, which needs the tokens of the last.
        """
        tp = self.execution.strategy.tp
        graphs = self.work.workload.cuda_graphs and self.execution.replays_graphs
        layer = self.times.decode(rows, context, tp, graphs, self.execution.strategy.ep)
        layer = layer + self._tp_reduces(rows) + self._to_experts(rows)
        slowest, around = self._stages(layer, self._to_next_stage(rows), self.times.sample(rows, tp))
        idle = max(0.0, around - pieces * slowest.total)
        host = pieces * (rows * self.execution.row_step_seconds + self.times.host_step(rows))
        return slowest.times(pieces) + Seconds(launch=host, pipeline_bubble=idle)

    def _pipelined(
        self,
        layer: Seconds,
        hop: Seconds,
        head: Seconds,
        pieces: int,
        again: Seconds = _NOTHING,
        recompute: Recompute = 0,
    ) -> Seconds:
        """Run `pieces` micro-batches through all stages; the seconds are per micro-batch.

        A recomputed layer takes `again` more (Chen et al. 2016).
        """
        slowest, around = self._stages(layer, hop, head, again, recompute)
        return slowest.times(pieces) + Seconds(pipeline_bubble=around - slowest.total)

    def _stages(
        self, layer: Seconds, hop: Seconds, head: Seconds, again: Seconds = _NOTHING, recompute: Recompute = 0
    ) -> tuple[Seconds, float]:
        """Return (time of the slowest stage, time of a micro-batch through all stages), in seconds."""
        pp = self.execution.strategy.pp
        last = self._layers(pp - 1, layer, again, recompute) + head
        if pp == 1:
            return last, last.total
        first, last = self._layers(0, layer, again, recompute) + hop, last + hop
        return max(first, last, key=lambda stage: stage.total), (pp - 1) * first.total + last.total

    def _layers(self, stage: int, layer: Seconds, again: Seconds, recompute: Recompute) -> Seconds:
        """Run the layers of a stage, those that are recomputed once more forward."""
        num_layers = self.times.sizes.stage_layers(self.execution.strategy.pp, stage)
        once = layer.times(num_layers)
        return once if recompute == 0 else once + again.times(recomputed_layers(recompute, num_layers))

    def _forward(self, rows: float, length: float) -> Seconds:
        """Run a layer forward, with its two all-reduces, and the exchange of tokens with experts."""
        strategy = self.execution.strategy
        layer = self.times.forward(rows, length, strategy.tp, self.execution.sequence_split, strategy.ep)
        if self.times.sizes.adapter is not None:
            layer = layer + self._adapter_reduces(rows * length, self.times.sizes.adapter.reduces[0])
        return layer + self._tp_reduces(rows * length) + self._to_experts(rows * length)

    def _backward(self, rows: float, length: float) -> Seconds:
        """Run a layer backward, without its forward again."""
        strategy = self.execution.strategy
        layer = self.times.backward(rows, length, strategy.tp, self.execution.sequence_split, strategy.ep)
        if self.times.sizes.adapter is not None:
            layer = layer + self._adapter_reduces(rows * length, self.times.sizes.adapter.reduces[1])
        reduces = self._tp_reduces(rows * length)
        if self.execution.tokens_over_tp:  # its inputs of products are gathered once more, for gradients of weights
            reduces = reduces.times(1.5)
        return layer + reduces + self._to_experts(rows * length)

    def _tp_reduces(self, tokens: float) -> Seconds:
        """Reduce [tokens, hidden] over the tensor-parallel group, twice a layer.

        With sequence parallelism a reduce-scatter and a gather of as many bytes take the place of each.
        """
        if self.execution.strategy.tp == 1:
            return Seconds()
        num_bytes = tokens * self.times.sizes.hidden * self.times.sizes.item
        return Seconds(tp_communication=2 * self.times.all_reduce(num_bytes, self.execution.tp_group()))

    def _adapter_reduces(self, tokens: float, numbers: Sequence[int]) -> Seconds:
        """Reduce [tokens, number] over the tensor-parallel group, for each message between the A's and B's of a layer.

        In vLLM they travel with the results of the base: there, they are counted too much.
        """
        if self.execution.strategy.tp == 1:
            return Seconds()
        item, group = self.times.sizes.item, self.execution.tp_group()
        messages = (self.times.all_reduce(tokens * number * item, group) for number in numbers)
        return Seconds(tp_communication=sum(messages))

    def _to_experts(self, tokens: float) -> Seconds:
        """Send a copy of [tokens, hidden] to each of a token's experts, and return their outputs.

        Experts are assumed to have equally many tokens.
        """
        if self.execution.strategy.ep == 1:
            return Seconds()
        sizes = self.times.sizes
        num_bytes = tokens * sizes.experts_per_token * sizes.hidden * sizes.item / self.execution.copies_split
        one_way = all_to_all_seconds(num_bytes, self.execution.ep_group(), self.times.links)
        return Seconds(ep_communication=2 * one_way)

    def _to_next_stage(self, tokens: float) -> Seconds:
        if self.execution.strategy.pp == 1:
            return Seconds()
        sizes = self.times.sizes
        num_bytes = tokens * sizes.hidden * sizes.item / self.execution.boundary_split
        passed = self.times.links.seconds(num_bytes, self.execution.pp_span()) + self.times.exchange()
        return Seconds(pp_communication=passed)

    @property
    def _head_tokens(self) -> float:
        """Tokens of a row that reach the head, on average."""
        return self.execution.head_tokens(self.work.workload.prompts.mean, self.work.workload.responses.mean)
