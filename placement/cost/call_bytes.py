"""Bytes that a call holds on a device while it runs, by kind.

Static bytes stay between calls: weights, gradients, optimizer states. Active bytes exist only during the call. The
counts follow the tensors that our engines keep. In training a layer keeps the inputs of its backward pass (norms'
inputs and outputs, attention's heads and result, the feed-forward layer's halves), as in Korthikanti et al. (2022,
section 4) without dropout and masks, and in the compute format. In a mixture of experts, a token passes through its
experts' feed-forward layers, and each expert's backward pass reads a copy of the token's hidden state. If devices
divide experts, the fullest device has `expert_imbalance` times as many tokens as the mean; no token is dropped.

With an adapter a layer keeps only the inputs of adapted matrices, which their A's need. It also keeps the activations
between A and B, and fused matrices' B's as a single matrix.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from prefect_rlhf.placement.cost.execution import Execution
from prefect_rlhf.placement.cost.paged_cache import pass_tokens, rows_at_once, whole_cache_bytes
from prefect_rlhf.placement.cost.sizes import ModelSizes
from prefect_rlhf.placement.cost.workload import CallWork, Workload
from prefect_rlhf.placement.engine_traits import TRAITS
from prefect_rlhf.placement.models.engine_constants import (
    ADAM_BYTES,
    COLUMN_BYTES,
    LOGITS_AT_ONCE_CPU,
    LOGITS_AT_ONCE_CUDA,
    LONGEST_EXPLICIT,
    MAIN_WEIGHT_BYTES,
    PASS_TOKENS,
    PLAY_BYTES,
    TOKEN_BYTES,
    window_block,
)
from prefect_rlhf.placement.models.four_bits import AT_ONCE, BLOCK
from prefect_rlhf.placement.models.layer_adapter import GATES, QUERIES_KEYS_VALUES
from prefect_rlhf.placement.plan import EngineKind, Recompute, recomputed_layers

SAMPLED_COPIES = 3  # of a row's logits in float32: whole, and two copies to sample from
NUM_COLUMNS = 6  # per response token, in a train_step: old, reference, value, return, advantage, mask


@dataclass(frozen=True, slots=True)
class CallBytes:
    """Bytes on a device at the call's fullest moment."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    working: int = 0
    """Exists only within the forward or backward of a single layer or of the head."""
    logits: int = 0
    """Exist only in the head."""
    kv_cache: int = 0
    rows: int = 0
    expert_imbalance: int = 0
    """For tokens that a device's experts may have beyond the mean."""

    @property
    def static(self) -> int:
        """Bytes that stay between calls: the compute weights, and everything that training adds to them."""
        return self.weights + self.gradients + self.optimizer

    @property
    def active(self) -> int:
        """Bytes that exist only while the call runs."""
        return self.activations + self.working + self.logits + self.kv_cache + self.rows + self.expert_imbalance

    @property
    def total(self) -> int:
        return self.static + self.active

    def by_term(self) -> dict[str, int]:
        """Return the terms that are not zero, the largest first."""
        named = {term.name: getattr(self, term.name) for term in fields(self)}
        return dict(sorted(((name, value) for name, value in named.items() if value), key=lambda item: -item[1]))


def call_bytes(
    work: CallWork,
    execution: Execution,
    sizes: ModelSizes,
    engine: EngineKind = "megatron",
    stage: int | None = None,
    max_length: int | None = None,
    on_cpu: bool = False,
) -> CallBytes:
    """Return a device's bytes during the call, on a given pipeline stage or by default on the fullest.

    The fullest stage is the first, with the embedding and most micro-batches, or the last, with the head. `max_length`
    is the row length that a key-value cache has room for, by default the workload's longest row. `on_cpu` means our
    engines' CPU kernels, which keep and stage less.
    """
    stages = sorted({0, execution.strategy.pp - 1}) if stage is None else [stage]
    longest = max_length or work.workload.longest
    found = [CallOnStage(work, execution, sizes, engine, each, longest, on_cpu).as_planned() for each in stages]
    return max(found, key=lambda num_bytes: num_bytes.total)


@dataclass(frozen=True, slots=True)
class CallOnStage:
    """A call on a device of a pipeline stage. Its key-value cache has room for rows of `max_length` tokens."""

    work: CallWork
    execution: Execution
    sizes: ModelSizes
    engine: EngineKind
    stage: int
    max_length: int
    on_cpu: bool

    def as_planned(self) -> CallBytes:
        """Return the device's bytes with the execution's own number of recomputed layers."""
        return self.num_bytes((self.execution.recompute,))[0]

    def num_bytes(self, recomputes: Sequence[Recompute]) -> list[CallBytes]:
        """Return the device's bytes for each number of recomputed layers in `recomputes`."""
        balanced = _loaded_bytes(self, recomputes, 1.0)
        if self.sizes.num_experts == 0 or self.execution.strategy.ep == 1:
            return balanced
        both = zip(balanced, _loaded_bytes(self, recomputes, self.work.workload.expert_imbalance), strict=True)
        return [replace(mean, expert_imbalance=fullest.active - mean.active) for mean, fullest in both]


def _loaded_bytes(call: CallOnStage, recomputes: Sequence[Recompute], load: float) -> list[CallBytes]:
    """The bytes if the experts of the device have `load` times as many tokens as the mean."""
    work, execution, stage = call.work, call.execution, call.stage
    on_device = call.sizes.on(execution.strategy.tp)
    static = static_bytes(execution, call.sizes, work.kind == "train_step", stage)

    def active(part: CallWork) -> _Active:
        return _Active(part, execution, on_device, stage, call.max_length, call.on_cpu, load)

    if work.kind == "generate":
        return [active(work).generate(static, call.engine)] * len(recomputes)
    if work.kind != "train_step":
        return [active(work).infer(static)] * len(recomputes)
    if not work.others:
        return active(work).train(static, recomputes)
    # a micro-batch belongs to a single row set; the rows of all row sets are on the device
    by_part = [active(part).train(static, recomputes) for part in work.by_row_set]
    rows = sum(each[0].rows for each in by_part)
    fullest = (max(each, key=lambda num_bytes: num_bytes.total) for each in zip(*by_part, strict=True))
    return [replace(each, rows=rows) for each in fullest]


def trial_bytes(rows: int, workload: Workload, cache_bytes: int, sizes: ModelSizes, tp: int) -> int:
    """Return the bytes that vLLM's trial pass takes on CUDA, before vLLM allocates the cache.

    The pass has as many tokens as any pass may have, and samples from the logits of as many rows as may be in flight
    (`profile_run` in vllm/v1/worker/gpu/model_runner.py). `rows` is the largest number of rows that a generate has.
    """
    length, load = workload.longest, workload.expert_imbalance if sizes.num_experts else 1.0
    at_once = rows_at_once(rows, cache_bytes, length, sizes, tp)
    forward = pass_tokens(rows, length, at_once) * _cuda_forward_bytes(sizes.on(tp), tp, load)
    return forward + at_once * sizes.vocab * SAMPLED_COPIES * 4


def static_bytes(execution: Execution, sizes: ModelSizes, trained: bool, stage: int = 0) -> CallBytes:
    """Return the bytes of weights and, if trained, of gradients and optimizer states, which replicas share (ZeRO, stage
    1).

    A follower's weights include its main weights.
    """
    weights = sizes.stage_bytes(execution.strategy, stage) + sizes.stage_main_bytes(execution.strategy, stage)
    if not trained:
        return CallBytes(weights=weights)
    state, strategy = ADAM_BYTES + (MAIN_WEIGHT_BYTES if sizes.dtype != "float32" else 0), execution.strategy
    written = sizes.stage_trained(strategy, stage)
    experts = sizes.stage_trained_experts(strategy, stage)  # the same in every ep-th replica alone
    return CallBytes(
        weights=weights,
        gradients=written * execution.gradient_bytes,
        optimizer=(written - experts) * state // strategy.dp + experts * state // (strategy.dp // strategy.ep),
    )


@dataclass(frozen=True, slots=True)
class _Active:
    """Active bytes of a call on a device of a stage."""

    work: CallWork
    execution: Execution
    sizes: ModelSizes
    stage: int
    max_length: int
    on_cpu: bool
    load: float  # of the device's experts: their tokens over the mean

    def generate(self, static: CallBytes, engine: EngineKind) -> CallBytes:
        """Add the cache, a forward pass of prompts, and the logits of a step."""
        portions, _ = self.execution.pieces(self._replica_rows // self.work.rows_per_item, train=False)
        in_flight = -(-self._replica_rows // portions)
        longest, token_bytes = self.work.workload.prompts.longest, TOKEN_BYTES + COLUMN_BYTES
        if self.work.play is not None:  # the prompt of a turn is all before it
            longest, token_bytes = self.max_length, token_bytes + PLAY_BYTES
        prompts = in_flight * longest
        if TRAITS[engine].paged_cache:
            whole = whole_cache_bytes(in_flight, self.max_length, self.sizes, self._tp)
            cached = whole if self.execution.cache_bytes is None else self.execution.cache_bytes
            in_pass = min(prompts, max(PASS_TOKENS, self.max_length))
        else:
            cached = in_flight * self.max_length * self._layers * self.sizes.cache_bytes_per_token(self._tp)
            in_pass = min(prompts, max(PASS_TOKENS, longest))
        if TRAITS[engine].paged_cache and not self.on_cpu:
            in_flight = rows_at_once(in_flight, cached, self.max_length, self.sizes, self._tp)
        logits = in_flight * self.sizes.vocab * SAMPLED_COPIES * 4 if self._is_last else 0
        if self._is_last:  # and what prompts have in the head before they are sampled from
            in_head = self.execution.head_tokens(prompts, 0)
            logits += in_head * -(-self.sizes.vocab // self._tp) * self.sizes.item
        return _with(
            static,
            working=in_pass * self._forward_bytes
            + (0 if TRAITS[engine].paged_cache else self._mask + self._fused_b[1] + self._dequantized),
            logits=logits,
            kv_cache=cached,
            rows=self._replica_rows * self.max_length * token_bytes,
        )

    def infer(self, static: CallBytes) -> CallBytes:
        """Add a micro-batch, within a layer or at its head."""
        tokens = self._micro_rows(train=False) * self._length
        hidden = (2 * tokens + self._head_tokens(tokens)) * self.sizes.hidden * self.sizes.item
        layer = tokens * self._forward_bytes + self._mask + self._fused_b[1] + self._dequantized
        moment = _fuller((layer, 0), (hidden, self._logits(tokens)))
        several = self._replica_rows * self._length > tokens  # then the previous hidden states still exist
        before = tokens * self.sizes.hidden * self.sizes.item if several else 0
        return _with(static, activations=before, **moment, rows=self._rows(2))

    def train(self, static: CallBytes, recomputes: Sequence[Recompute]) -> list[CallBytes]:
        """Add the saved inputs of every backward in flight: of at most pp - stage micro-batches (1F1B).

        All of them exist when the last layer's backward begins. The head's backward has ended by then. Of a recomputed
        layer only its input is saved, until its backward makes the rest. The first layers of a stage are recomputed, so
        that the saved inputs of other layers are freed before.
        """
        rows = self._micro_rows(train=True)
        split = self.execution.strategy.tp if self.execution.tokens_over_tp else 1
        tokens = -(-rows * self._length // split) * split  # filled up, so that tp divides them
        dp, pp = self.execution.strategy.dp, self.execution.strategy.pp
        mini_batches = (part.mini_batch_rows(dp) // part.rows_per_item for part in (self.work, *self.work.others))
        pieces = sum(self.execution.pieces(items, train=True)[1] for items in mini_batches)
        in_flight, num_layers = min(pieces, pp - self.stage), self._layers
        layer, boundary = self._saved_bytes, self.sizes.hidden * self.sizes.item // self.execution.sequence_split
        gathered = 0
        if self.execution.tokens_over_tp:  # all tokens: a buffer of the products, and the last hidden states
            gathered = (2 if self._is_last else 1) * self.sizes.hidden * self.sizes.item
        backward, head = (
            self._layer_backward(rows, tokens) + self._dequantized,
            (self._head_backward(tokens), self._logits(tokens)),
        )
        row_bytes, fused_b = self._rows(2 + NUM_COLUMNS), self._fused_b[0]
        found = []
        for recompute in recomputes:
            again = recomputed_layers(recompute, num_layers)
            kept = in_flight * (again * boundary + (num_layers - again) * layer)
            recomputed = layer - boundary if again == num_layers else 0  # the last layer, whose backward is the first
            activations = tokens * (kept + in_flight * (2 if self._is_last else 1) * boundary + gathered)
            activations += in_flight * (num_layers - again) * fused_b
            backward_then = backward + (fused_b if again == num_layers else 0)
            moment = _fuller((tokens * recomputed + backward_then, 0), head)
            found.append(_with(static, activations=activations, **moment, rows=row_bytes))
        return found

    @property
    def _dequantized(self) -> int:
        """Bytes of the largest weight in four bits while a product needs it: gate and up, or queries, keys and values.

        With what dequantises it, a part at a time.
        """
        if self.sizes.base_dtype is None:
            return 0
        rows = max(2 * self.sizes.inner, self.sizes.queries + 2 * self.sizes.keys)
        elements = rows * self.sizes.hidden // self._tp
        return elements * self.sizes.item + 6 * min(elements, AT_ONCE) + 40 * elements // BLOCK

    @property
    def _tp(self) -> int:
        return self.execution.strategy.tp

    @property
    def _layers(self) -> int:
        return self.sizes.stage_layers(self.execution.strategy.pp, self.stage)

    @property
    def _is_last(self) -> bool:
        return self.stage == self.execution.strategy.pp - 1

    @property
    def _length(self) -> int:
        return self.work.workload.longest

    @property
    def _replica_rows(self) -> int:
        return self.work.replica_rows(self.execution.strategy.dp)

    def _micro_rows(self, train: bool) -> int:
        rows = self.work.mini_batch_rows(self.execution.strategy.dp) if train else self._replica_rows
        items = rows // self.work.rows_per_item
        portions, pieces = self.execution.pieces(items, train)
        return -(-items // (portions * pieces)) * self.work.rows_per_item

    @property
    def _saved_bytes(self) -> int:
        """Bytes that a token keeps in a layer: two norms' inputs and outputs, heads, attention twice, feed-forward."""
        sizes = self.sizes
        inner = self._inner
        split = 3 * sizes.queries + 2 * sizes.keys + 3 * inner
        if sizes.qk_norm:  # what their norms were given
            split += sizes.queries + sizes.keys
        if not self.on_cpu:  # torch's kernels also keep the rotated queries and keys, and silu(gate)
            split += sizes.queries + sizes.keys + inner
            split += sizes.queries if sizes.heads > sizes.kv_heads else 0  # apart from the keys that several share
        if sizes.window is not None and self._length > sizes.window and self.on_cpu:  # by torch's kernels, as on CUDA
            split += sizes.queries + sizes.keys
        heads = sizes.heads + (sizes.heads + sizes.kv_heads if sizes.qk_norm else 0)
        num_norms = 4 if sizes.norms_after else 2
        small = num_norms * 4 + 4 * heads / self._tp  # the norms' and attention's float32 statistics
        small += 2 * 4 * sizes.num_experts  # the router's logits and shares
        whole = (num_norms + 2) * sizes.hidden / self.execution.sequence_split  # of those after, the inputs alone
        copies = self.load * sizes.experts_per_token * sizes.hidden
        if sizes.adapter is not None:
            norms = sum(not sizes.adapter.count(*names) for names in (QUERIES_KEYS_VALUES, GATES))
            whole -= norms * sizes.hidden / self.execution.sequence_split  # their results, which no backward reads
            split -= 0 if sizes.adapter.count("o_proj") else sizes.queries
            split -= 0 if sizes.adapter.count("down_proj") else inner
            whole += sizes.adapter.narrow
        return int((whole + copies + split / self._tp) * sizes.item + small)

    @property
    def _fused_b(self) -> tuple[int, int]:
        """Bytes of the B's of fused matrices, each fusion as a single matrix, and of the largest while it is made."""
        adapter, sizes = self.sizes.adapter, self.sizes
        if adapter is None:
            return 0, 0
        rows = {QUERIES_KEYS_VALUES: sizes.queries + 2 * sizes.keys, GATES: 2 * sizes.inner}
        fused = [rows[names] // self._tp * adapter.count(*names) * adapter.rank * sizes.item for names in rows]
        return sum(fused), 2 * max(fused)

    @property
    def _inner(self) -> float:
        """Width of the feed-forward layers that a token goes through, all together."""
        return self.load * _inner(self.sizes)

    @property
    def _copies(self) -> float:
        return self.load * _copies(self.sizes)

    @property
    def _forward_bytes(self) -> int:
        """Bytes of a token while a layer computes: residual and norm, and the larger of attention and feed-forward."""
        sizes = self.sizes
        if self.on_cpu:  # attention spreads packed rows and works on a copy
            attention = 2 * sizes.hidden + (5 * sizes.queries + 6 * sizes.keys) / self._tp
            feed_forward = 4 * sizes.hidden + self._copies + _inner_at_once(sizes) * self._inner / self._tp
            feed_forward += 0 if sizes.adapter is None else 2 * sizes.adapter.rank  # between A's and B's of gate and up
            return int(max(attention, feed_forward) * sizes.item)
        return _cuda_forward_bytes(sizes, self._tp, self.load, has_blocks=self._has_blocks)

    def _layer_backward(self, rows: int, tokens: int) -> float:
        """Count gradients of the larger of feed-forward and attention while the last layer's backward computes.

        A weight's gradient is whole, in the compute format, before it is added to its buffer; the largest is the
        gradient of gate and up. On CPU, attention makes all scores of short rows at once. Its backward runs after the
        saved inputs of the feed-forward layer were freed.
        """
        sizes, tp = self.sizes, self._tp
        inner, hidden = self._inner, 3 * sizes.hidden + self._copies
        if self.execution.tokens_over_tp:  # gradients of all tokens, before and after a product
            hidden += 2 * sizes.hidden
        experts = max(1, sizes.num_experts // self.execution.strategy.ep)  # of a device
        of_weight = experts * 2 * sizes.inner * sizes.hidden / tp  # gate and up
        if sizes.adapter is not None:  # the base has none, and its inputs have a gradient through A, too
            of_weight, hidden = self._fused_b[1] / sizes.item, hidden + sizes.hidden
        if not self.on_cpu:
            attention, feed_forward = 4 * sizes.queries + 4 * sizes.keys, 4 * inner
            attention += sizes.queries + 2 * sizes.keys if self._has_blocks else 0  # parts that blocks add to a whole
            return (tokens * (hidden + max(attention, feed_forward) / tp) + of_weight) * sizes.item + self._mask
        feed_forward_bytes = (tokens * (hidden - sizes.hidden + 2 * inner / tp) + of_weight) * sizes.item
        change = (2 * sizes.queries + 2 * sizes.keys - 3 * inner) / tp - sizes.hidden
        return max(feed_forward_bytes, self._scores(rows) + tokens * change * sizes.item)

    @property
    def _has_blocks(self) -> bool:
        """Whether attention on CUDA runs block by block, because rows are longer than a window."""
        return not self.on_cpu and self.sizes.window is not None and self._length > self.sizes.window

    @property
    def _mask(self) -> int:
        """Bytes of the mask for a block of queries, which all layers with a window share."""
        if not self._has_blocks or self.sizes.window is None:
            return 0
        size, reach = window_block(self.sizes.window)
        return self.sizes.heads // self.sizes.kv_heads * size * (reach + size) * self.sizes.item

    def _scores(self, rows: int) -> int:
        """Count the scores of short rows that attention's backward makes on CPU: float32 twice, and narrower copies."""
        if self._length > LONGEST_EXPLICIT:
            return 0
        heads = -(-self.sizes.heads // self._tp)
        return rows * heads * self._length**2 * (2 * 4 + 2 * (self.sizes.item % 4))

    def _head_tokens(self, tokens: int) -> int:
        lengths = self.work.workload
        in_head = self.execution.head_tokens(lengths.prompts.longest, lengths.responses.longest)
        return -(-tokens * in_head // max(1, self._length))

    def _logits(self, tokens: int) -> int:
        """Count the logits of the last stage's head, which makes some of the vocabulary at a time."""
        if not self._is_last or "lm" not in self.sizes.head or not self.work.vocabulary_passes:
            return 0
        tokens = self._head_tokens(tokens)
        at_once = max(LOGITS_AT_ONCE_CPU if self.on_cpu else LOGITS_AT_ONCE_CUDA, 128 * tokens)
        return self.execution.logit_bytes(tokens * -(-self.sizes.vocab // self._tp), at_once, self.sizes.item)

    def _head_backward(self, tokens: int) -> int:
        """Count hidden states that reach the head, their gradient in float32, and products with it."""
        if not self._is_last:
            return 0
        return self._head_tokens(tokens) * self.sizes.hidden * (3 * self.sizes.item + 4)

    def _rows(self, columns: int) -> int:
        """Count token ids, four numbers as large for each that place packed tokens, and columns of responses."""
        row = self._length * 5 * TOKEN_BYTES + self.work.workload.responses.longest * columns * COLUMN_BYTES
        return self._replica_rows * row


def _cuda_forward_bytes(sizes: ModelSizes, tp: int, load: float, has_blocks: bool = False) -> int:
    """Count the bytes of a token while a layer computes on CUDA; `load` is the tokens of experts over their mean.

    With `has_blocks`, attention runs block by block.
    """
    attention = 4 * sizes.queries + 6 * sizes.keys
    attention += sizes.queries if has_blocks else 0  # results of blocks, and all of them
    feed_forward = _inner_at_once(sizes) * load * _inner(sizes)
    return int((3 * sizes.hidden + load * _copies(sizes) + max(attention, feed_forward) / tp) * sizes.item)


def _inner_at_once(sizes: ModelSizes) -> int:
    """Count tensors of the feed-forward layer's width that exist at once: gate, up and the result of both.

    If an adapter adds to gate and up, the sums are new tensors.
    """
    return 4 if sizes.adapter is not None and sizes.adapter.count(*GATES) else 3


def _inner(sizes: ModelSizes) -> int:
    """Return the width of the feed-forward layers that a token goes through, all together."""
    return sizes.inner * max(1, sizes.experts_per_token)


def _copies(sizes: ModelSizes) -> int:
    """Count elements of a token's copies for its experts, and of the experts' outputs, while the layer computes.

    Megatron weighs experts inside them, so no backward reads their outputs.
    """
    return 2 * sizes.experts_per_token * sizes.hidden


def _fuller(*moments: tuple[float, float]) -> dict[str, float]:
    """Return the larger of moments that cannot be at once, each with its working bytes and logits."""
    working, logits = max(moments, key=sum)
    return {"working": working, "logits": logits}


def _with(
    static: CallBytes,
    activations: float = 0,
    working: float = 0,
    logits: float = 0,
    kv_cache: float = 0,
    rows: float = 0,
) -> CallBytes:
    active = int(activations), int(working), int(logits), int(kv_cache), int(rows)
    return CallBytes(static.weights, static.gradients, static.optimizer, *active)
