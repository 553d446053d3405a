"""A rank that times its engines: passes through layers, the rest of a call, weight moves, messages.

A gang's ranks time the same work at the same moment, just as a call's ranks work, because they share memory and links.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, cast, final

import torch
import torch.distributed as dist
from torch import Tensor

from prefect_rlhf.engines.commands import BuildCommand, MoveWeightsCommand, RankReport
from prefect_rlhf.engines.engine import (
    Engine,
    GenerationEngine,
    SamplingSettings,
    Sequences,
    TrainingEngine,
    TrainingRows,
    TrainSettings,
)
from prefect_rlhf.engines.files.huggingface import write_folder
from prefect_rlhf.engines.losses.protocol import LossTerm, LossValues
from prefect_rlhf.engines.process_groups import uses_nccl
from prefect_rlhf.engines.rank.profiling.layer_clock import LayerClock, clocked, clocked_method, now, worked
from prefect_rlhf.engines.rank.rank import Rank, build_engine
from prefect_rlhf.engines.weights.send_receive import send_receive
from prefect_rlhf.errors.errors import EngineFailed
from prefect_rlhf.placement.engine_traits import TRAITS
from prefect_rlhf.placement.models.model import Dtype, ModelSpec
from prefect_rlhf.placement.models.weights import parameters
from prefect_rlhf.placement.plan import ModelInstance

WEIGHT_DEVIATION = 0.02  # of random weights, as models are initialised
LAYERS = 8
"""Weights that matrix products use in turn, so that they are not in the caches closest to a core."""
STEPS = 6  # of decoding; the first is the prefill's


@dataclass(frozen=True, slots=True)
class PassSeconds:
    """An engine call's time in seconds: until its first layer, in the layers, and after them."""

    before: float
    forward: float
    ends: float
    """After a forward: the head or, in a generation, sampling and everything until the next pass."""
    after: float = 0.0
    """Until the call returns."""
    backward: float = 0.0
    """In the layers, for a train_step."""
    decode: float = 0.0
    """In the layers, for a single step of a generation."""
    call: float = 0.0
    """The whole call."""
    together: float = 0.0
    """Until the last rank's call has returned."""


@dataclass(frozen=True, slots=True)
class WorkSeconds:
    """The fastest run of some work on a device, in seconds, and the share of its cores' time spent on other programs.

    The share, from 0 to 1, is 0 on a GPU.
    """

    seconds: float
    busy: float


@final
class ProfilingRank:
    """A rank as rlhf/profile uses it. Methods are called on all ranks at once, unless they say otherwise.

    If `busy` states how many ranks work, the other ranks wait for them.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._engines: dict[ModelInstance, Any] = {}
        self._replaying: set[ModelInstance] = set()  # engines that replay CUDA graphs
        self._work = Rank(rank, size, self._built)
        self._groups: dict[int, dist.ProcessGroup] = {}

    def write_model(self, model: ModelSpec) -> None:
        """Write the folder named by `model`, with random weights; a single rank does it for all."""
        generator = torch.Generator().manual_seed(self.rank)
        tensors = (
            (p.name, torch.randn(p.shape, generator=generator).mul_(WEIGHT_DEVIATION)) for p in parameters(model)
        )
        write_folder(model.path, model, tensors, Path(model.path))

    def remove_model(self, model: ModelSpec) -> None:
        """Remove that folder."""
        shutil.rmtree(model.path, ignore_errors=True)

    def build(self, command: BuildCommand) -> RankReport:
        """Build as a run does."""
        return self._work.build(command)

    def infer(self, instance: ModelInstance, rows: int, length: int, repeats: int, busy: int) -> PassSeconds:
        """Time log-probabilities of rows in which the second half is the response."""
        engine = cast(TrainingEngine, self._engines[instance])
        return self._timed(instance, lambda: engine.infer(_sequences(rows, length), "logprobs", 1, 1.0), repeats, busy)

    def train(self, instance: ModelInstance, rows: int, length: int, repeats: int, busy: int) -> PassSeconds:
        """Time an optimizer step over a micro-batch of such rows."""
        return self._train(instance, rows, length, repeats, busy, now)

    def train_worked(self, instance: ModelInstance, rows: int, length: int, repeats: int, busy: int) -> PassSeconds:
        """Time the same in processor time, because a step on a single rank never waits."""
        return self._train(instance, rows, length, repeats, busy, worked)

    def _train(
        self, instance: ModelInstance, rows: int, length: int, repeats: int, busy: int, clock: Callable[[], float]
    ) -> PassSeconds:
        engine = cast(TrainingEngine, self._engines[instance])

        def step() -> None:
            sequences = _sequences(rows, length)
            columns = {"mask": sequences.response_mask_BT()}
            engine.train([TrainingRows(sequences, (MEAN_LOGPROB,), (columns,))], TrainSettings())

        return self._timed(instance, step, repeats, busy, clock)

    def generate(self, instance: ModelInstance, rows: int, context: int, repeats: int, busy: int) -> PassSeconds:
        """Time a few tokens after prompts that fill most of the context."""
        engine = cast(GenerationEngine, self._engines[instance])
        sampling = SamplingSettings(STEPS, stop_at_eos=False)

        def call() -> None:
            prompts = _tokens(rows, max(1, context - STEPS // 2)).tolist()
            engine.generate(prompts, sampling, list(range(rows)))

        return self._timed(instance, call, repeats, busy)

    def repack(self, instance: ModelInstance) -> float:
        """Measure how much longer the first generation takes after weights were written."""
        engine = self._engines[instance]
        sampling = SamplingSettings(1, stop_at_eos=False)

        def generate_once() -> float:
            began = now()
            engine.generate(_tokens(1, 4).tolist(), sampling, [0])
            return now() - began

        generate_once()  # warms up
        packed = min(generate_once(), generate_once())
        engine.weights_written()
        return max(0.0, generate_once() - packed)

    def reallocate(self, command: MoveWeightsCommand) -> RankReport:
        """Move weights as a run does. Unlike the other methods, it may be called on only some ranks."""
        return self._work.reallocate(command)

    def offload(self, instance: ModelInstance) -> RankReport:
        """Offload as a run does."""
        self._together()
        return self._work.offload(instance)

    def reload(self, instance: ModelInstance) -> RankReport:
        """Reload as a run does."""
        self._together()
        return self._work.reload(instance)

    def send(self, num_bytes: int, repeats: int) -> float:
        """Measure the seconds to send `num_bytes` to the next rank while receiving as many from the previous rank."""
        outgoing, incoming = _bytes(num_bytes), _bytes(num_bytes)
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        return self._least(lambda: send_receive({after: [outgoing]}, {before: [incoming]}), repeats)

    def send_one_way(self, num_bytes: int, repeats: int) -> float:
        """Measure the seconds to send `num_bytes` from each even rank to the next rank."""
        message = [_bytes(num_bytes)]
        other = self.rank + 1 if self.rank % 2 == 0 else self.rank - 1
        pairs = {other: message} if other < self.size else {}
        sent, received = (pairs, {}) if self.rank % 2 == 0 else ({}, pairs)
        return self._least(lambda: send_receive(sent, received), repeats)

    def multiply(self, tokens: int, columns: int, dtype: Dtype, repeats: int) -> WorkSeconds:
        """Measure a matrix product [tokens, columns] x [columns, columns]; successive products use different
        weights.
        """
        from prefect_rlhf.engines.cpu_products import product

        options: dict[str, Any] = {"dtype": getattr(torch, dtype), "device": _device()}
        values, weights = torch.ones(tokens, columns, **options), torch.ones(LAYERS, columns, columns, **options)
        layer = itertools.cycle(weights)
        return self._work_seconds(lambda: product(values, next(layer).t()), repeats)

    def copy(self, num_bytes: int, repeats: int) -> WorkSeconds:
        """Measure a copy within a device."""
        source, target = _bytes(num_bytes), _bytes(num_bytes)
        return self._work_seconds(lambda: target.copy_(source), repeats)

    def copy_to_host(self, num_bytes: int, repeats: int) -> WorkSeconds:
        """Measure a copy from the device to its host."""
        source, target = _bytes(num_bytes), torch.zeros(num_bytes, dtype=torch.uint8)
        target = target.pin_memory() if torch.cuda.is_available() else target
        return self._work_seconds(lambda: target.copy_(source), repeats)

    def all_reduce(self, num_bytes: int, size: int, repeats: int) -> float:
        """Measure the seconds to add up `num_bytes` of bfloat16 over each `size` consecutive ranks."""
        group, values = self._group(size), torch.zeros(num_bytes // 2, dtype=torch.bfloat16, device=_device())
        return self._least(lambda: dist.all_reduce(values, group=group), repeats)

    def share(self, num_elements: int, size: int, repeats: int) -> float:
        """Measure the seconds to sum float32 gradients over `size` replicas by shares, and to gather bfloat16 weights.

        On a GPU it uses the collectives of Megatron's buffers, on CPU the messages that replace them.
        """
        from prefect_rlhf.engines.megatron.cpu.gradient_buffers import gather_shares, sum_shares

        group = self._group(size)
        gradients = torch.zeros(-(-num_elements // size) * size, device=_device())
        weights = gradients.to(torch.bfloat16)

        def exchange() -> None:
            if uses_nccl(gradients):
                own = len(gradients) // size
                mine = slice(dist.get_rank(group) * own, (dist.get_rank(group) + 1) * own)
                dist.reduce_scatter_tensor(gradients[mine], gradients, group=group)
                dist.all_gather_into_tensor(weights, weights[mine], group=group)
            else:
                sum_shares(gradients, weights.dtype, group)
                gather_shares(weights, group)

        return self._least(exchange, repeats)

    def _built(self, command: BuildCommand, rank: int) -> Engine:
        self._engines[command.instance] = built = build_engine(command, rank)
        if command.cuda_graphs and torch.cuda.is_available() and TRAITS[command.instance.engine].replays_graphs:
            self._replaying.add(command.instance)
        return built

    def _clocked(
        self, instance: ModelInstance, clock_seconds: Callable[[], float]
    ) -> AbstractContextManager[LayerClock]:
        """Stamp passes of an engine: of its layers, or of its whole forward if it replays CUDA graphs."""
        engine = self._engines[instance]
        if instance in self._replaying:
            owner, method = engine.forward_method
            return clocked_method(owner, method, clock_seconds)
        return clocked(engine.layers, clock_seconds)

    def _timed(
        self,
        instance: ModelInstance,
        call: Callable[[], object],
        repeats: int,
        busy: int,
        clock_seconds: Callable[[], float] = now,
    ) -> PassSeconds:
        """Return the fastest call after the first, which warms up; an idle rank returns zeros."""
        calls = []
        for _ in range(repeats + 1):
            self._together()
            if self.rank >= busy:
                self._last(0.0)
                continue
            with self._clocked(instance, clock_seconds) as clock:
                began = clock_seconds()
                call()
                ended = clock_seconds()
            parts = _parts(began, ended, clock.forwards, clock.backwards)
            calls.append(replace(parts, together=self._last(ended) - began))
        if not calls:
            return PassSeconds(0.0, 0.0, 0.0)
        return min(calls[1:], key=attrgetter("call"))

    def _work_seconds(self, call: Callable[[], object], repeats: int) -> WorkSeconds:
        """Time work that never waits, on all ranks at once; on CPU in processor time of each of the rank's threads."""
        used, elapsed = [], []
        call()  # warms up
        self._together()
        for _ in range(repeats):
            began, before = now(), worked()
            call()
            used.append(worked() - before)
            elapsed.append(now() - began)
        return WorkSeconds(min(used), max(0.0, 1 - sum(used) / sum(elapsed)))

    def _least(self, call: Callable[[], object], repeats: int) -> float:
        """Return the fastest of some calls, in seconds, after a first that warms up: other programs only add time."""
        seconds = []
        for _ in range(repeats + 1):
            self._together()
            began = now()
            call()
            seconds.append(now() - began)
        return min(seconds[1:])

    def _together(self) -> None:
        """Wait for the other ranks."""
        if self.size > 1:
            dist.barrier()

    def _last(self, ended: float) -> float:
        """Return the latest of all ranks' ends: processes of a host share a clock."""
        last = torch.tensor([ended], dtype=torch.float64, device=_device())
        if self.size > 1:
            dist.all_reduce(last, op=dist.ReduceOp.MAX)
        return last.item()

    def _group(self, size: int) -> dist.ProcessGroup:
        """Return this rank's group among the groups of `size` consecutive ranks."""
        if size not in self._groups:
            for first in range(0, self.size, size):
                members = list(range(first, min(first + size, self.size)))
                group = dist.new_group(members)  # of all ranks: each of them makes each group
                if self.rank in members:
                    self._groups[size] = group
        return self._groups[size]


def logprobs_alone(logprobs_BT: Tensor, batch: Mapping[str, Tensor]) -> LossValues:
    """A loss that costs almost no time."""
    return LossValues(logprobs_BT)


MEAN_LOGPROB = LossTerm(logprobs_alone, ("logprobs",))  # type: ignore[arg-type]  # a single output


def _parts(
    began: float, ended: float, forwards: Sequence[tuple[float, float]], backwards: Sequence[tuple[float, float]]
) -> PassSeconds:
    """Split a call's seconds. Raises EngineFailed when no pass went through its layers."""
    if not forwards:
        raise EngineFailed("no pass went through the layers that are timed")
    (first, left), steps, call = forwards[0], forwards[1:], ended - began
    if backwards:
        (entered, done), *_ = backwards
        return PassSeconds(first - began, left - first, entered - left, ended - done, done - entered, call=call)
    if steps:
        gaps = [after[0] - before[1] for before, after in zip(forwards, steps, strict=False)]
        decode = min(end - start for start, end in steps)
        after = ended - forwards[-1][1]
        return PassSeconds(first - began, left - first, min(gaps), after, decode=decode, call=call)
    return PassSeconds(first - began, left - first, ended - left, call=call)


def _sequences(rows: int, length: int) -> Sequences:
    return Sequences(_tokens(rows, length), torch.full((rows,), length - length // 2), torch.full((rows,), length))


def _tokens(rows: int, length: int) -> Tensor:
    """Draw other tokens each time, so that no cache of prefixes knows them."""
    return torch.randint(3, 32, (rows, length))


def _bytes(num_bytes: int) -> Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8, device=_device())


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
