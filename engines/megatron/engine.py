"""MegatronEngine: generate, inference and train_step of a model instance on this rank.

Shapes: S tokens of a row (padded), b rows of a micro-batch, H hidden, B rows of the replica, T response tokens, N
response tokens of a micro-batch.
"""

from collections.abc import Callable, Collection, Iterator, Sequence, Set
from functools import cached_property, partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from torch import Tensor

from prefect_rlhf.engines.commands import BuildCommand
from prefect_rlhf.engines.engine import (
    Conversed,
    Engine,
    Generated,
    PlayTable,
    SamplingSettings,
    Sequences,
    Shard,
    StatePart,
    TrainingRows,
    TrainSettings,
)
from prefect_rlhf.engines.megatron import weights
from prefect_rlhf.engines.megatron.cpu import shim as cpu_shim
from prefect_rlhf.engines.megatron.groups import build_groups
from prefect_rlhf.engines.megatron.model import build_model, clear_padding, num_vocabulary_rows, own_device
from prefect_rlhf.engines.megatron.sampling.generation import Generation
from prefect_rlhf.engines.megatron.sampling.row_group import row_groups
from prefect_rlhf.engines.megatron.training import loss_sums as losses
from prefect_rlhf.engines.megatron.training.batches import (
    MicroBatch,
    micro_batch,
    micro_batches,
    scatter_rows,
    tokens_of,
)
from prefect_rlhf.engines.megatron.training.gradient_buffers import with_gradient_buffers
from prefect_rlhf.engines.megatron.training.key_value_copies import KeyValueCopies
from prefect_rlhf.engines.megatron.training.optimizer import MainOptimizer
from prefect_rlhf.engines.megatron.training.tokens_over_tp import tokens_over_tp
from prefect_rlhf.engines.megatron.vocabulary.outputs import HeadInput, function_of
from prefect_rlhf.engines.process_groups import shared
from prefect_rlhf.engines.sampling.conversation import in_rounds
from prefect_rlhf.engines.sampling.response_end import check_lengths, ends_of, stopped_turns
from prefect_rlhf.engines.sampling.stop_strings import stop_strings
from prefect_rlhf.engines.weights.memory import storage_bytes
from prefect_rlhf.engines.weights.offload import OffloadedTensors, empty
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.models.outputs import OUTPUTS
from prefect_rlhf.placement.plan import OffloadPart, recomputed_layers

FromHidden = Callable[[Tensor, MicroBatch], Any]
"""A function of the last stage on a micro-batch's hidden states, [S, b, H] or packed [tokens, 1, H]."""
Work = Sequence[tuple[MicroBatch, FromHidden]]


class MegatronEngine:
    """A role's weights on a mesh, split by the instance's strategy, with an optimizer if the role is trained."""

    def __init__(self, command: BuildCommand, rank: int) -> None:
        cpu_shim.install()
        self.instance = command.instance
        self._command, self._spec = command, command.model
        self._groups = build_groups(command.ranks, command.instance.strategy, rank)
        self._model = build_model(self._spec, self._groups, on_host=bool(command.shared))
        self._num_rows = num_vocabulary_rows(self._spec, self._groups)
        self._wrapped: Any = self._model
        self._optimizer: MainOptimizer | None = None
        self._offloaded = {name: OffloadedTensors(own_device()) for name in ("weights", "optimizer")}
        self._lent: set[int] = set()  # storages of other engines
        self._max_length = command.max_sequence_length
        if self._spec.optimizer is None:
            self._model.requires_grad_(False)
        else:
            copies = KeyValueCopies.of(self._model, self._spec.shape, self._groups)
            self._wrapped = with_gradient_buffers(self._model, self._groups, copies)
            self._optimizer = MainOptimizer(self._wrapped, self._spec.optimizer, self._groups, copies)
        self._shards = weights.shards(self._model, self._spec, self._groups)
        if not command.shared:
            self._load(self._own_content)

    def weights(self) -> dict[str, Shard]:
        """The compute weights as views under their Hugging Face names."""
        return self._shards

    def weights_written(self) -> None:
        """Update the main weights from the compute weights."""
        self._outdate_host_copies()
        if self._optimizer is not None:
            self._optimizer.reload_main_weights()

    def share(self, lent: Sequence[tuple[Engine, Collection[str]]]) -> None:
        """See SharingEngine."""
        parameters_of, taken = weights.by_storage(self._shards), set[str]()
        for owner, names in lent:
            theirs = owner.weights()
            for name, own in self._model.named_parameters():
                held = parameters_of.get(own.untyped_storage()._cdata, frozenset())
                if held and held.issubset(names):
                    lent_by = f"{self.instance.name}: {name} of {owner.instance.name}"
                    own.data = weights.lent(own, [(self._shards[each], theirs[each]) for each in sorted(held)], lent_by)
                    taken |= held
                    self._lent.add(own.untyped_storage()._cdata)
        self._model.to(own_device())
        clear_padding(self._model, self._num_rows)  # an engine that lends its vocabulary may not have
        self._shards = weights.shards(self._model, self._spec, self._groups)
        self._load(self._own_content - taken)

    @property
    def _own_content(self) -> Set[str]:
        """The parameters that a folder or the seed fills; a checkpoint has the others."""
        return self._shards.keys() if self._command.restore is None else self._command.frozen

    def _load(self, names: Collection[str]) -> None:
        """Read parameters from the model's folder."""
        if names:
            weights.load(
                {name: shard for name, shard in self._shards.items() if name in names}, self._spec, self._command.seed
            )
            self.weights_written()

    @property
    def layers(self) -> Sequence[torch.nn.Module]:
        """The transformer layers of this stage, for timing."""
        layers: Sequence[torch.nn.Module] = self._model.decoder.layers
        return layers

    @property
    def num_updates(self) -> int:
        return self._optimizer.num_updates if self._optimizer else 0

    def state_parts(self) -> Iterator[StatePart]:
        return self._optimizer.state_parts(self._shards) if self._optimizer else iter(())

    def begin_after(self, num_updates: int) -> None:
        assert self._optimizer is not None, f"{self._spec.role} has no optimizer"
        self._outdate_host_copies()
        self._optimizer.begin_after(num_updates)

    def infer(self, sequences: Sequences, output: str, micro_batches: int, temperature: float) -> Tensor | None:
        micros = self._cut(sequences, micro_batches)
        self._model.eval()
        wanted = (output, temperature)
        with torch.no_grad():
            parts = self._run(
                [(micro, lambda hidden, of: self._outputs(hidden, of, [wanted])[wanted]) for micro in micros]
            )
        if not self._groups.is_last_stage or self._groups.coordinate.tp:
            return None
        if not parts:
            entry = OUTPUTS[output]
            return torch.empty((0,) if entry.per == "row" else (0, 0), device=self._device)
        return scatter_rows(list(zip(micros, parts, strict=True)), len(sequences))

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingSettings,
        seeds: Sequence[int],
        micro_batches: int = 1,
    ) -> Generated:
        """See GenerationEngine.generate; log-probabilities have the same meaning as VllmEngine's. Needs only the
        trained weights.

        The key-value cache exists while this runs, for the call's rows, longest prompt and `max_new_tokens`.
        """
        check_lengths(prompts, sampling, self._max_length)
        return self._generate(prompts, sampling, seeds, micro_batches)

    @property
    def leads(self) -> bool:
        """See PlayingEngine."""
        return dist.get_rank(self._groups.replica) == 0

    @cached_property  # a model that only trains needs no tokenizer
    def _end_tokens(self) -> tuple[int, ...]:
        return ends_of(self._command)

    def converse(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingSettings,
        seeds: Sequence[int],
        table: PlayTable | None,
        micro_batches: int = 1,
        *,
        together: bool = True,
    ) -> Conversed:
        """See PlayingEngine.converse. Plays always proceed in rounds; each round computes the rows' keys and values
        again.
        """

        def generate(
            contexts: Sequence[Sequence[int]], turn_seeds: Sequence[int], at_most: Sequence[int]
        ) -> tuple[Generated, Sequence[bool]]:
            made = self._generate(contexts, sampling, turn_seeds, micro_batches, at_most)
            return made, stopped_turns(made.tokens, at_most, sampling, self._end_tokens, stops)

        stops = stop_strings(sampling.stop, self._spec.path)
        return in_rounds(prompts, seeds, table, partial(shared, group=self._groups.replica), generate)

    def _generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingSettings,
        seeds: Sequence[int],
        micro_batches: int,
        at_most: Sequence[int] | None = None,
    ) -> Generated:
        self._model.eval()
        with torch.no_grad():
            stops, layers = stop_strings(sampling.stop, self._spec.path), self._model.decoder.layers
            groups = row_groups(prompts, sampling, self._end_tokens, layers, micro_batches, stops, at_most)
            return Generation(self._model, self._spec.shape.vocab_size, self._groups, sampling, seeds).run(groups)

    def train(self, rows: Sequence[TrainingRows], settings: TrainSettings) -> dict[str, float]:
        assert self._optimizer is not None, f"{self._spec.role} has no optimizer"
        self._outdate_host_copies()
        passes = losses.pass_rows(rows, settings, self._device)
        weights_MT3 = self._weights(passes, settings.mini_batches)
        some_without_rows = any(each.some_without_rows for each in rows)
        steps: list[tuple[losses.Sums, list[list[float]]]] = []
        norms = []
        self._model.train()
        split = self._groups.strategy.tp if settings.tokens_over_tp else 1
        recomputed = recomputed_layers(settings.recompute, len(self.layers))
        for number, layer in enumerate(self._model.decoder.layers):
            layer.recomputes = number < recomputed
        for mini_batch in list(range(settings.mini_batches)) * settings.epochs:
            work = self._work(passes, mini_batch, settings.micro_batches, weights_MT3[mini_batch], split)
            with tokens_over_tp(self._model, settings.tokens_over_tp):
                sums, norm = self._step(work, bool(weights_MT3[mini_batch].any()), some_without_rows)
            steps.append((sums, weights_MT3[mini_batch].tolist()))
            norms.append(norm)
        skipped = sum(not weights_T3.any() for weights_T3 in weights_MT3) * settings.epochs
        if skipped == len(steps):
            return {"skipped_updates": float(skipped)}
        terms = [term for each in rows for term in each.terms]
        initial = losses.means(steps[:1], terms, "initial_{}".format)
        metrics = initial | losses.means(steps, terms) | {"grad_norm": sum(norms) / (len(norms) - skipped)}
        metrics["learning_rate"] = self._optimizer.learning_rate
        counts = {"skipped_updates": skipped, "empty_updates": norms.count(0.0) - skipped}
        return metrics | {name: float(count) for name, count in counts.items() if count}

    def device_bytes(self) -> int:
        """Bytes of weights, gradient buffers and optimizer state on the device; a generate's caches are not
        included.
        """
        return storage_bytes([*self._compute_weights(), *chain(*self._segment("optimizer"))])

    def offload(self, part: OffloadPart = "all", copies: bool = True) -> int:
        """Empty a part's storages; return the bytes copied to host memory. Gradients are not copied."""
        names = self._segments(part)
        return sum(self._offloaded[name].offload(*self._segment(name), copies=copies) for name in names)

    def reload(self, part: OffloadPart = "all", copies: bool = True) -> int:
        """Bring a part back; return the bytes copied from host memory."""
        return sum(self._offloaded[name].reload(copies) for name in self._segments(part))

    def close(self) -> None:
        """Empty all storages. The process groups stay, because other engines of the process share them."""
        empty([*self._compute_weights(), *chain(*self._segment("optimizer"))])
        for tensors in self._offloaded.values():
            tensors.close()

    def _outdate_host_copies(self) -> None:
        for tensors in self._offloaded.values():
            tensors.written()

    @property
    def _device(self) -> torch.device:
        device: torch.device = next(self._model.parameters()).device
        return device

    def _cut(self, sequences: Sequences, count: int) -> list[MicroBatch]:
        in_pipeline = self._groups.strategy.pp > 1
        micros = micro_batches(sequences, torch.arange(len(sequences)), count, equal_shapes=in_pipeline)
        return [micro.to(self._device) for micro in micros]

    def _outputs(
        self, hidden: Tensor, micro: MicroBatch, wanted: Sequence[losses.Wanted]
    ) -> dict[losses.Wanted, Tensor]:
        """Compute the requested outputs of response tokens, [b, T], or of rows, [b]; vectors have an axis more."""
        sequences, place_SB = micro.sequences, micro.packing.place_SB
        packed_NH = hidden.flatten(0, 1)
        row_N, t_N = micro.response_index()
        position_N = sequences.prompt_lengths_B[row_N] + t_N
        hidden_NH = packed_NH[place_SB[position_N - 1, row_N]]
        targets_N = sequences.tokens_BS[row_N, position_N]
        found: dict[losses.Wanted, Tensor] = {}
        for name, temperature in wanted:
            output = OUTPUTS[name]
            states_NH, after_N = hidden_NH, targets_N
            if output.per == "row":
                last_b = sequences.lengths_B - 1
                states_NH = packed_NH[place_SB[last_b, torch.arange(len(sequences), device=last_b.device)]]
                after_N = targets_N[:0]
            weight = self._model.head_weight(output.head)
            read = HeadInput(states_NH, after_N, weight, temperature, self._groups.tp, self._num_rows)
            made = function_of(output.made_by)(read)
            if output.per == "token":
                whole = made.new_zeros(len(sequences), micro.width, *made.shape[1:])
                made = whole.index_put((row_N, t_N), made)
            found[name, temperature] = made
        return found

    def _weights(self, passes: Sequence[losses.PassRows], mini_batches: int) -> Tensor:
        """Return the weights of every mini-batch's means, [mini-batches, terms, 3], on every rank."""
        box: list[Tensor | None] = [None]
        if self._groups.is_last_stage:
            box = [losses.mini_batch_weights(passes, mini_batches, self._groups.dp, self._device)]
        self._tell_stages(box)
        assert box[0] is not None  # received from the last stage
        return box[0]

    def _work(
        self, passes: Sequence[losses.PassRows], mini_batch: int, count: int, weights_T3: Tensor, split: int
    ) -> list[tuple[MicroBatch, FromHidden]]:
        """Cut a mini-batch of every row set into micro-batches of multiples of `split` tokens, each with its losses."""
        rows_of = [(each, rows) for each in passes for rows in each.micro_rows(mini_batch, count)]
        in_pipeline = self._groups.strategy.pp > 1
        num_tokens = max((tokens_of(each.rows.sequences, rows) for each, rows in rows_of), default=0)

        def filled(own_tokens: int) -> int:
            return -(-(num_tokens if in_pipeline else own_tokens) // split) * split

        micros = (
            micro_batch(each.rows.sequences, rows, filled(tokens_of(each.rows.sequences, rows)))
            for each, rows in rows_of
        )
        losses_of = (partial(self._loss, each, weights_T3) for each, _ in rows_of)
        return [(micro.to(self._device), of) for micro, of in zip(micros, losses_of, strict=True)]

    def _loss(
        self, rows: losses.PassRows, weights_T3: Tensor, hidden: Tensor, micro: MicroBatch
    ) -> tuple[Tensor, Tensor, dict[losses.SumKey, Tensor]]:
        """Compute a micro-batch's part of the loss, in the form for Megatron's schedule, and its sums."""
        total, sums = rows.loss(self._outputs(hidden, micro, rows.wanted), micro, weights_T3)
        num_tokens = torch.ones((), dtype=torch.int)  # Megatron requires a count, but does not use it
        return total, num_tokens, sums

    def _step(self, work: Work, has_weight: bool, some_without_rows: bool) -> tuple[losses.Sums, float]:
        """Take an optimizer step; return the sums of losses and metrics, and the gradient's norm."""
        assert self._optimizer is not None  # checked by `train`
        self._wrapped.zero_grad_buffer()
        stored = self._run(work, train=True)
        box: list[losses.Sums] = [{}]
        if self._groups.is_last_stage:
            keys = losses.known_keys(stored, some_without_rows, self._groups.dp)
            box = [losses.sum_over_replicas(stored, keys, self._groups.dp, self._device)]
        self._tell_stages(box)
        return box[0], self._optimizer.step() if has_weight else 0.0  # a mean without values updates no weights

    def _tell_stages(self, box: list[Any]) -> None:
        """Send the content of the last stage's box to the other stages of its pipeline."""
        if self._groups.strategy.pp > 1:
            dist.broadcast_object_list(box, src=self._groups.last_stage_rank, group=self._groups.pp)

    def _run(self, work: Work, train: bool = False) -> list[Any]:
        """Send micro-batches through Megatron's schedule; return the last stage's result for each.

        Stages and shards of a replica have the same rows. Without rows they exchange no messages and
        compute no gradient, but in training the replicas still add their gradients.
        """
        in_pipeline = self._groups.strategy.pp > 1
        if not work:
            if train:
                self._model.config.finalize_model_grads_func([self._wrapped], pg_collection=self._groups.collection)
            return []

        def forward(data: Iterator[tuple[MicroBatch, FromHidden]], model: Any) -> tuple[Tensor, Any]:
            micro, from_hidden = next(data)
            hidden = model(micro.input_ids, micro.packing)
            return hidden, lambda hidden, **_: from_hidden(hidden, micro)

        stored: list[Any] = get_forward_backward_func(self._groups.strategy.pp, None)(
            forward_step_func=forward,
            data_iterator=iter(work),
            model=[self._wrapped],
            num_microbatches=len(work),
            seq_length=len(work[0][0].packing.token_N),
            micro_batch_size=1,
            forward_only=not train,
            collect_non_loss_data=not train,
            p2p_communicator=P2PCommunicator(self._groups.pp, self._model.config) if in_pipeline else None,
            pg_collection=self._groups.collection,
        )
        return stored

    def _segments(self, part: OffloadPart) -> tuple[str, ...]:
        """Name the segments that a part moves; each is offloaded and reloaded separately."""
        if part == "optimizer" and self._optimizer is None:
            raise InvalidInput(f"{self.instance.name}: offload", part, "all: it is not trained, so has no optimizer")
        return ("weights", "optimizer") if part == "all" else (part,)

    def _segment(self, name: str) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Return a segment's tensors as OffloadedTensors takes them; gradients are scratch, zeroed before each step."""
        if name == "weights":
            return list(self._model.parameters()), [], list(self._model.buffers())
        weights = {tensor.untyped_storage()._cdata for tensor in self._compute_weights()}
        state = [] if self._optimizer is None else list(self._optimizer.tensors())
        own = [tensor for tensor in state if tensor.untyped_storage()._cdata not in weights]  # float32: of weights
        buffers = getattr(self._wrapped, "buffers", []) if self._optimizer else []
        return own, [buffer.grad_data for buffer in buffers], []

    def _compute_weights(self) -> list[Tensor]:
        """Return the tensors of its own weights, without tensors that other engines lend."""
        every = [*self._model.parameters(), *self._model.buffers()]
        return [tensor for tensor in every if tensor.untyped_storage()._cdata not in self._lent]
