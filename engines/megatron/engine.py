"""MegatronEngine: generate, inference and train_step of one model instance on this rank.

Shapes: S tokens of a row (padded), b rows of a micro-batch, H hidden, B rows of the replica, T response tokens,
N response tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from torch import Tensor

from prefect_rlhf.engines.commands import BuildCommand
from prefect_rlhf.engines.engine import (
    Generated,
    Loss,
    Output,
    SamplingSettings,
    Sequences,
    Shard,
    StatePart,
    TrainSettings,
)
from prefect_rlhf.engines.megatron import weights
from prefect_rlhf.engines.megatron.batches import MicroBatch, micro_batches, mini_batch_rows, on_device, scatter_rows
from prefect_rlhf.engines.megatron.cpu import shim as cpu_shim
from prefect_rlhf.engines.megatron.generation import Generation
from prefect_rlhf.engines.megatron.gradient_buffers import sum_gradients, with_gradient_buffers
from prefect_rlhf.engines.megatron.groups import build_groups
from prefect_rlhf.engines.megatron.head import token_logprobs, token_values
from prefect_rlhf.engines.megatron.model import build_model, head_weight, num_vocabulary_rows
from prefect_rlhf.engines.megatron.optimizer import MainOptimizer
from prefect_rlhf.engines.megatron.row_group import row_groups
from prefect_rlhf.engines.sampling.response_end import check_lengths, end_tokens
from prefect_rlhf.engines.weights.memory import storage_bytes
from prefect_rlhf.engines.weights.offload import HostLink, OffloadedTensors
from prefect_rlhf.placement.errors import InvalidInput
from prefect_rlhf.placement.plan import OffloadPart

FromHidden = Callable[[Tensor, MicroBatch], Any]
"""A function of the last stage on a micro-batch's hidden states, [S, b, H] or packed [tokens, 1, H]."""


class MegatronEngine:
    """One role's weights on one mesh, split by the instance's strategy; with an optimizer when the role is trained."""

    def __init__(self, command: BuildCommand, rank: int) -> None:
        cpu_shim.install()
        self.instance = command.instance
        self._spec = command.model
        self._groups = build_groups(command.ranks, command.instance.strategy, rank)
        self._model = build_model(self._spec, self._groups)
        self._num_rows = num_vocabulary_rows(self._spec, self._groups)
        self._wrapped: Any = self._model
        self._optimizer: MainOptimizer | None = None
        self._links: dict[str, HostLink] = {}
        self._offloaded: dict[str, OffloadedTensors] = {}  # by the names of `_segment`
        self._max_length, self._end_tokens = command.max_sequence_length, end_tokens(self._spec.path)
        self._caches: list[Tensor] = []  # of the generate that runs: each takes its own and frees it
        if self._spec.optimizer is None:
            self._model.requires_grad_(False)
        else:
            self._wrapped = with_gradient_buffers(self._model, self._groups)
            self._optimizer = MainOptimizer(self._wrapped, self._spec.optimizer, self._groups)
        self._shards = weights.shards(self._model, self._spec, self._groups)
        if command.restore is None:  # else they come from there
            weights.load(self._shards, self._spec)
            self.weights_written()

    def weights(self) -> dict[str, Shard]:
        """Views of the compute weights under their Hugging Face names."""
        return self._shards

    def weights_written(self) -> None:
        """Refresh the main weights from the compute weights."""
        if self._optimizer is not None:
            self._optimizer.reload_main_weights()

    @property
    def layers(self) -> Sequence[torch.nn.Module]:
        """The transformer layers of this stage, for whoever times them."""
        layers: Sequence[torch.nn.Module] = self._model.decoder.layers
        return layers

    @property
    def num_updates(self) -> int:
        """See TrainingEngine.num_updates."""
        return self._optimizer.num_updates if self._optimizer else 0

    def state_parts(self) -> Iterator[StatePart]:
        """See TrainingEngine.state_parts."""
        return self._optimizer.state_parts(self._shards) if self._optimizer else iter(())

    def begin_after(self, num_updates: int) -> None:
        """See TrainingEngine.begin_after."""
        assert self._optimizer is not None, f"{self._spec.role} has no optimizer"
        self._optimizer.begin_after(num_updates)

    def infer(self, sequences: Sequences, output: Output, micro_batches: int, temperature: float) -> Tensor | None:
        """See TrainingEngine.infer."""
        whole = on_device(sequences, self._device)
        micros = self._cut(whole, torch.arange(len(whole)), micro_batches)
        self._model.eval()
        with torch.no_grad():
            parts = self._run(micros, partial(self._output, output=output, temperature=temperature))
        if not self._groups.is_last_stage or self._groups.coordinate.tp:
            return None
        if not parts:
            return torch.empty((0,) if output == "scores" else (0, 0), device=self._device)
        return scatter_rows(list(zip(micros, parts, strict=True)), len(whole))

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingSettings,
        seeds: Sequence[int],
        micro_batches: int = 1,
    ) -> Generated:
        """See GenerationEngine.generate; log-probabilities are as VllmEngine's. Needs no weights but the trained ones.

        The key-value cache exists while this runs, for the call's rows, longest prompt and `max_new_tokens`.
        """
        check_lengths(prompts, sampling, self._max_length)
        self._model.eval()
        try:
            with torch.no_grad():
                groups = row_groups(prompts, sampling, self._end_tokens, self._model.decoder.layers, micro_batches)
                self._caches = [group.cache.tensor for group in groups]
                return Generation(self._model, self._spec.shape.vocab_size, self._groups, sampling, seeds).run(groups)
        finally:
            self._caches = []

    def train(
        self, sequences: Sequences, batch: Mapping[str, Tensor], loss: Loss, settings: TrainSettings
    ) -> dict[str, float]:
        """See TrainingEngine.train."""
        whole = on_device(sequences, self._device)
        columns = {key: batch[key].to(self._device) for key in batch}
        steps: list[dict[str, float]] = []
        norms = []
        self._model.train()
        for _ in range(settings.epochs):
            for rows in mini_batch_rows(len(whole), settings.mini_batches, settings.mini_batch_rows):
                micros = self._cut(whole, rows, settings.micro_batches, settings.rows_per_item)
                sums, norm = self._step(micros, columns, loss, settings)
                steps.append(sums)
                norms.append(norm)
        initial = {f"initial_{name}": value for name, value in means(steps[:1]).items()}
        return initial | means(steps) | {"grad_norm": sum(norms) / len(norms)}

    def device_bytes(self) -> int:
        """Bytes of weights, gradient buffers, optimizer state and key-value caches that are on the device."""
        return storage_bytes([*self._compute_weights(), *chain(*self._segment("optimizer")), *self._caches])

    def offload(self, part: OffloadPart = "all") -> int:
        """Empty a part's storages, keeping copies in host memory (gradients are not kept); return the bytes freed."""
        freed = 0
        for name in self._segments(part):
            if name not in self._offloaded:
                link = self._links.setdefault(name, HostLink(self._device))
                self._offloaded[name] = OffloadedTensors(*self._segment(name), link)
                freed += self._offloaded[name].num_bytes
        return freed

    def reload(self, part: OffloadPart = "all") -> int:
        """Bring a part back; return the bytes."""
        offloaded = [name for name in self._segments(part) if name in self._offloaded]
        return sum(self._offloaded.pop(name).restore() for name in offloaded)

    @property
    def _device(self) -> torch.device:
        device: torch.device = next(self._model.parameters()).device
        return device

    def _cut(self, sequences: Sequences, rows: Tensor, count: int, rows_per_item: int = 1) -> list[MicroBatch]:
        in_pipeline = self._groups.strategy.pp > 1
        return micro_batches(sequences, rows, count, rows_per_item, equal_shapes=in_pipeline)

    def _output(self, hidden: Tensor, micro: MicroBatch, *, output: Output, temperature: float) -> Tensor:
        """Compute log-probabilities or values [b, T] of the response tokens, or scores [b]."""
        weight, sequences, place_SB = head_weight(self._model), micro.sequences, micro.packing.place_SB
        packed_NH = hidden.flatten(0, 1)
        if output == "scores":
            last_b = sequences.lengths_B - 1
            return token_values(packed_NH[place_SB[last_b, torch.arange(len(sequences), device=last_b.device)]], weight)
        row_N, t_N = micro.response_index()
        position_N = sequences.prompt_lengths_B[row_N] + t_N
        hidden_NH = packed_NH[place_SB[position_N - 1, row_N]]
        if output == "values":
            values_N = token_values(hidden_NH, weight)
        else:
            targets_N = sequences.tokens_BS[row_N, position_N]
            values_N = token_logprobs(hidden_NH, weight, targets_N, temperature, self._groups.tp, self._num_rows)
        return values_N.new_zeros(len(sequences), micro.width).index_put((row_N, t_N), values_N)

    def _step(
        self, micros: list[MicroBatch], columns: Mapping[str, Tensor], loss: Loss, settings: TrainSettings
    ) -> tuple[dict[str, float], float]:
        """Take one optimizer step; return the sums of loss, metrics and weight, and the gradient's norm."""
        assert self._optimizer is not None, f"{self._spec.role} has no optimizer"
        self._wrapped.zero_grad_buffer()

        def loss_sums(hidden: Tensor, micro: MicroBatch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            output = self._output(hidden, micro, output=settings.output, temperature=settings.temperature)
            terms = loss(output, micro.columns(columns))
            sums = {"loss": terms.total, "weight": terms.weight, **terms.metrics}
            num_tokens = torch.ones((), dtype=torch.int)  # Megatron wants to count them, and does not use it
            return terms.total, num_tokens, {name: value.detach() for name, value in sums.items()}

        stored = self._run(micros, loss_sums, train=True)
        sums = self._sum_over_mesh(stored, self._names(stored, settings.some_without_rows))
        if not sums["weight"]:  # a mean over nothing moves nothing
            return sums, 0.0
        return sums, self._optimizer.step(sums["weight"])

    def _run(self, micros: list[MicroBatch], from_hidden: FromHidden, train: bool = False) -> list[Any]:
        """Send micro-batches through Megatron's schedule; return what the last stage made of each.

        Stages and shards of a replica have the same rows. Without any there is nothing to send between them, and in
        training no gradient; replicas still add theirs up.
        """
        in_pipeline = self._groups.strategy.pp > 1
        if not micros:
            if train:
                sum_gradients([self._wrapped], pg_collection=self._groups.collection)
            return []

        def forward(data: Iterator[MicroBatch], model: Any) -> tuple[Tensor, Any]:
            micro = next(data)
            hidden = model(micro.input_ids, micro.packing)
            return hidden, lambda hidden, **_: from_hidden(hidden, micro)

        stored: list[Any] = get_forward_backward_func(self._groups.strategy.pp, None)(
            forward_step_func=forward,
            data_iterator=iter(micros),
            model=[self._wrapped],
            num_microbatches=len(micros),
            seq_length=len(micros[0].packing.token_N),
            micro_batch_size=1,
            forward_only=not train,
            collect_non_loss_data=not train,
            p2p_communicator=P2PCommunicator(self._groups.pp, self._model.config) if in_pipeline else None,
            pg_collection=self._groups.collection,
        )
        return stored

    def _names(self, stored: list[dict[str, Tensor]], some_without_rows: bool) -> list[str]:
        """Return the names of the last stages' sums; a replica without rows hears them from one that has some."""
        own = list(stored[0]) if stored else []
        if not some_without_rows or not self._groups.is_last_stage:
            return own
        of_replicas: list[list[str]] = [[] for _ in range(self._groups.dp.size())]
        dist.all_gather_object(of_replicas, own, group=self._groups.dp)
        return next(filter(None, of_replicas))

    def _sum_over_mesh(self, stored: list[dict[str, Tensor]], names: Sequence[str]) -> dict[str, float]:
        """Add up the last stages' sums over micro-batches and replicas; the same on every rank."""
        sums: dict[str, float] = {}
        if self._groups.is_last_stage:
            vector = torch.zeros(len(names), dtype=torch.double, device=self._device)
            for sum_ in stored:
                vector += torch.stack([sum_[name].double() for name in names])
            dist.all_reduce(vector, group=self._groups.dp)
            sums = dict(zip(names, vector.tolist(), strict=True))
        if self._groups.strategy.pp > 1:
            box = [sums]
            dist.broadcast_object_list(box, src=self._groups.last_stage_rank, group=self._groups.pp)
            sums = box[0]
        return sums

    def _segments(self, part: OffloadPart) -> tuple[str, ...]:
        """Name the segments that a part moves; each comes and goes by itself."""
        if part == "optimizer" and self._optimizer is None:
            raise InvalidInput(f"{self.instance.name}: offload", part, "all: it is not trained, so has no optimizer")
        return ("weights", "optimizer") if part == "all" else ("optimizer",)

    def _segment(self, name: str) -> tuple[list[Tensor], list[Tensor]]:
        """Return what of a segment is kept, and what comes back as zeros: gradients, zeroed before each step."""
        if name == "weights":
            return self._compute_weights(), []
        weights = {tensor.untyped_storage()._cdata for tensor in self._compute_weights()}
        state = [] if self._optimizer is None else list(self._optimizer.tensors())
        own = [tensor for tensor in state if tensor.untyped_storage()._cdata not in weights]  # float32: of weights
        return own, [buffer.grad_data for buffer in getattr(self._wrapped, "buffers", [])] if self._optimizer else []

    def _compute_weights(self) -> list[Tensor]:
        return [*self._model.parameters(), *self._model.buffers()]


def means(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Divide the sums of some optimizer steps by the sum of their `weight`.

    >>> means([{"weight": 1.0, "loss": 2.0}, {"weight": 3.0, "loss": 6.0}])
    {'loss': 2.0}
    """
    weight = sum(step["weight"] for step in steps) or 1.0
    return {name: sum(step[name] for step in steps) / weight for name in steps[0] if name != "weight"}
