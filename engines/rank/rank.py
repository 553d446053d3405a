"""A rank: one device's engines and rows. The controller calls its methods by name, through the gang."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast, final

import torch

from prefect_rlhf.engines.commands import (
    BuildCommand,
    CallCommand,
    Digest,
    MoveWeightsCommand,
    RankReport,
    RowSource,
    TransferCommand,
)
from prefect_rlhf.engines.compute import Computed, Context
from prefect_rlhf.engines.engine import Engine, GenerationEngine, TrainingEngine
from prefect_rlhf.engines.files.checkpoint_files import check_shard
from prefect_rlhf.engines.files.export import export
from prefect_rlhf.engines.files.saved_state import SavedState, decode, encode
from prefect_rlhf.engines.files.training_state import restore, save
from prefect_rlhf.engines.rank.exchange_rows import exchange_rows
from prefect_rlhf.engines.rank.inputs import CallInputs, read_call_inputs, read_prompts
from prefect_rlhf.engines.rank.loaded import LoadedModel
from prefect_rlhf.engines.rank.store import RowStore
from prefect_rlhf.engines.rows import unpad
from prefect_rlhf.engines.sampling.seeds import row_seeds
from prefect_rlhf.engines.weights.memory import resident_bytes
from prefect_rlhf.engines.weights.move_weights import WeightMover
from prefect_rlhf.placement.errors import EngineFailed, RlhfError
from prefect_rlhf.placement.layout.layout import Layout
from prefect_rlhf.placement.plan import ModelInstance, OffloadPart


def build_engine(order: BuildCommand, rank: int) -> Engine:
    """The engine that the instance names, imported only where it is used."""
    if order.instance.engine == "vllm":
        from prefect_rlhf.engines.vllm.engine import VllmEngine

        return VllmEngine(order, rank)
    from prefect_rlhf.engines.megatron.engine import MegatronEngine

    return MegatronEngine(order, rank)


def check_layout(engine: Engine, order: BuildCommand, rank: int) -> None:
    """Raise EngineFailed unless the engine holds what the order's layout says: all moves of weights rely on it."""
    held = {name: shard.region for name, shard in engine.weights().items()}
    regions = order.layout.regions
    for name in sorted(held.keys() | regions.keys()):
        stated = regions.get(name, {}).get(rank)
        if held.get(name) != stated:
            raise EngineFailed(f"{order.instance.name} holds {held.get(name)} of {name}, its layout says {stated}")
    for name, shard in engine.weights().items():
        if shard.view.dtype != getattr(torch, order.model.dtype):
            found = f"holds {name} as {shard.view.dtype}"
            raise EngineFailed(f"{order.instance.name} {found}, its model says {order.model.dtype}")


@final
class Rank:
    """What one rank process holds and can do. Every method that does work returns a Report."""

    def __init__(
        self, rank: int, size: int, engine_factory: Callable[[BuildCommand, int], Engine] = build_engine
    ) -> None:
        self.rank, self.size = rank, size
        self._engine_factory = engine_factory
        self.store = RowStore()
        self._residents: dict[ModelInstance, LoadedModel] = {}
        self._datasets: dict[str, RowSource] = {}
        self._weight_mover = WeightMover(rank)
        self._states: dict[str, Any] = {}  # what stateful computations return for the next step, by call

    def build(self, order: BuildCommand) -> RankReport:
        """Make the instance's engine and load its weights: version 0, or that of a checkpoint. Collective."""
        began = time.perf_counter()
        engine = self._engine_factory(order, self.rank)
        check_layout(engine, order, self.rank)
        if order.restore is not None:
            restore(cast(TrainingEngine, engine), order.restore.folder)
        resident = self._residents[order.instance] = LoadedModel(engine, order)
        version = order.restore.version if order.restore else 0
        return self._report(began, resident, digest=resident.written(version))

    def open_dataset(self, source: RowSource) -> None:
        """Make the dataset's rows readable here, under its name."""
        self._datasets[source.name] = source

    def generate(self, order: CallCommand) -> RankReport:
        """Continue this replica's prompts. Keeps `tokens`, `prompt_length` and `logprobs` of its rows."""
        began, resident = time.perf_counter(), self._begin(order)
        assert order.sampling is not None  # a generate order has it
        prompts = read_prompts(order, self._datasets)
        engine = cast(GenerationEngine, resident.engine)
        made = engine.generate(prompts, order.sampling, row_seeds(order), order.micro_batches)
        tokens = [torch.tensor([*p, *r]) for p, r in zip(prompts, made.tokens, strict=True)]
        self._keep(order, "tokens", tokens)
        self._keep(order, "prompt_length", [torch.tensor(len(prompt)) for prompt in prompts])
        self._keep(order, "logprobs", [torch.tensor(row, dtype=torch.float32) for row in made.logprobs])
        lengths = tuple(map(len, tokens))
        return self._report(began, resident, order=order, num_tokens=sum(map(len, made.tokens)), row_lengths=lengths)

    def inference(self, order: CallCommand) -> RankReport:
        """Run the model over this replica's rows. Keeps `order.output` where the engine returns it."""
        began, resident = time.perf_counter(), self._begin(order)
        inputs = self._inputs(order)
        sequences = inputs.sequences(order.doing)
        engine = cast(TrainingEngine, resident.engine)
        made = engine.infer(sequences, order.output, order.micro_batches, order.temperature)
        if made is not None:
            lengths = (sequences.lengths_B - sequences.prompt_lengths_B).tolist()
            self._keep(order, order.output, unpad(made.float().cpu(), lengths))
        return self._report(began, resident, order=order, num_tokens=int(sequences.lengths_B.sum()))

    def train_step(self, order: CallCommand) -> RankReport:
        """Take the optimizer steps of one train_step, after which the weights are version `order.writes`."""
        began, resident = time.perf_counter(), self._begin(order, "optimizer")
        assert order.train is not None and order.function is not None and order.writes is not None
        inputs = self._inputs(order)
        sequences = inputs.sequences(order.doing)
        engine = cast(TrainingEngine, resident.engine)
        metrics = engine.train(sequences, inputs.training_batch(sequences), order.function, order.train)
        tokens = int(sequences.lengths_B.sum()) * order.train.epochs
        digest = resident.written(order.writes)
        return self._report(began, resident, order=order, digest=digest, metrics=metrics, num_tokens=tokens)

    def compute(self, order: CallCommand) -> RankReport:
        """Run a computation on all rows of the step. Keeps its columns; its state waits for the next step."""
        began = time.perf_counter()
        assert order.function is not None
        inputs = self._inputs(order)
        evaluation = order.call.every is not None
        context = Context(order.step, order.run_dir, order.tokenizer, order.row_ids, order.versions, evaluation)
        with torch.no_grad():
            state = self._states.get(order.call.name)
            made: Computed = order.function(*inputs.batches, context=context, state=state)
        if order.call.stateful:
            self._states[order.call.name] = made.state
        for key, column in made.columns.items():
            self._keep(order, key, unpad(column, inputs.lengths_of(column)))
        return self._report(began, order=order, metrics=made.metrics)

    def transfer(self, order: TransferCommand) -> RankReport:
        """Send and receive this rank's part of the rows that a node moves."""
        began = time.perf_counter()
        return self._report(began, order=order, bytes_moved=exchange_rows(self.store, order, self.rank))

    def reallocate(self, order: MoveWeightsCommand) -> RankReport:
        """Bring a version from one instance's storage into another's; the digest is the target's."""
        began = time.perf_counter()
        source, target = self._residents.get(order.source), self._residents.get(order.target)
        doing = f"reallocate {order.source.name} to {order.target.name}"
        if source is not None:
            source.require(order.version, doing)
        read = None if source is None else source.engine
        write = None if target is None else target.engine
        moved = self._weight_mover.move(read, write, order)
        digest = target.written(order.version) if target is not None else None
        report = self._report(began, *filter(None, (source, target)), digest=digest, bytes_moved=moved.bytes_moved)
        return replace(report, peak_extra_bytes=moved.peak_extra_bytes)

    def offload(self, instance: ModelInstance, part: OffloadPart = "all") -> RankReport:
        """Move an instance, or its optimizer alone, to host memory. Runs beside calls of other instances or parts."""
        began, resident = time.perf_counter(), self._resident(instance, "offload")
        return self._report(began, bytes_moved=resident.offload(part))

    def reload(self, instance: ModelInstance, part: OffloadPart = "all") -> RankReport:
        """Bring back what was offloaded; weights are hashed as a whole again. Runs beside calls as offload does."""
        began, resident = time.perf_counter(), self._resident(instance, "reload")
        bytes_moved = resident.reload(part)
        if part != "all":  # the weights stayed, and may be in use
            return self._report(began, bytes_moved=bytes_moved)
        digest = resident.written(resident.version)
        return self._report(began, resident, digest=digest, bytes_moved=bytes_moved)

    def digest(self, instance: ModelInstance) -> Digest:
        """The whole digest of an instance's weights as they are now."""
        return self._resident(instance, "digest").current_digest()

    def export(self, instance: ModelInstance, path: Path, tokenizer: Path, layout: Layout) -> RankReport:
        """Write a Hugging Face folder. Collective over the ranks of `layout`; its first rank writes."""
        began, resident = time.perf_counter(), self._resident(instance, "export")
        resident.require(resident.version, f"export {path.name}")
        bytes_moved = export(resident.engine, resident.model, layout, path, tokenizer, self.rank)
        return self._report(began, resident, bytes_moved=bytes_moved)

    def checkpoint(self, instance: ModelInstance, version: int, folder: Path) -> RankReport:
        """Write this rank's shard of an instance's weights and optimizer into a role's folder."""
        began, resident = time.perf_counter(), self._resident(instance, "checkpoint")
        resident.require(version, f"checkpoint {folder.name}")
        written = save(cast(TrainingEngine, resident.engine), resident.order, folder, self.rank)
        return self._report(began, resident, bytes_moved=written)

    def check_shards(self, indexes: Sequence[tuple[str, Path]]) -> RankReport:
        """Hold shards of roles against their checksums."""
        began = time.perf_counter()
        return self._report(began, bytes_moved=sum(check_shard(index, role) for role, index in indexes))

    def states(self, calls: Sequence[str]) -> dict[str, SavedState]:
        """What these computations left for their next run, to be written down; nothing of those that never ran."""
        return {name: encode(self._states[name], name) for name in calls if name in self._states}

    def restore_states(self, states: Mapping[str, SavedState]) -> None:
        """The inverse of `states`."""
        self._states |= {name: decode(state) for name, state in states.items()}

    def store_keys(self, step: int) -> tuple[tuple[str, str], ...]:
        """(call, key) of the rows held of a step."""
        return self.store.keys(step)

    def memory(self) -> dict[str, int]:
        """Device bytes of each instance by name; `store`: of rows; `resident`, `peak_resident`: of this process."""
        instances = {instance.name: r.engine.device_bytes() for instance, r in self._residents.items()}
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        rows = {"store": self.store.num_bytes}
        return {**instances, **rows, "resident": resident_bytes(), "peak_resident": peak}

    def _begin(self, order: CallCommand, part: OffloadPart | None = None) -> LoadedModel:
        assert order.instance is not None  # only compute has none
        resident = self._resident(order.instance, order.doing)
        resident.require(order.reads, order.doing, part)
        return resident

    def _resident(self, instance: ModelInstance, doing: str) -> LoadedModel:
        if instance not in self._residents:
            raise RlhfError(f"{doing}: {instance.name} was not built on this rank")
        return self._residents[instance]

    def _inputs(self, order: CallCommand) -> CallInputs:
        return read_call_inputs(order, self.store, self._datasets)

    def _keep(self, order: CallCommand, key: str, rows: Iterable[torch.Tensor]) -> None:
        self.store.put(order.step, order.call.name, key, dict(zip(order.rows, rows, strict=True)))

    def _report(
        self,
        began: float,
        *residents: LoadedModel,
        order: CallCommand | TransferCommand | None = None,
        digest: Digest | None = None,
        metrics: Mapping[str, float] | None = None,
        bytes_moved: int = 0,
        num_tokens: int = 0,
        row_lengths: tuple[int, ...] = (),
    ) -> RankReport:
        """What was done; the rows that nobody on this rank uses after `order` are freed first."""
        if order is not None:
            self.store.free(order.step, order.frees)
        return RankReport(
            seconds=time.perf_counter() - began,
            metrics=metrics or {},
            digest=digest,
            bytes_moved=bytes_moved,
            device_bytes=sum(r.engine.device_bytes() for r in self._residents.values()),
            resident_bytes=resident_bytes(),
            fingerprint_seconds=sum(resident.take_fingerprint_seconds() for resident in residents),
            num_tokens=num_tokens,
            row_lengths=row_lengths,
            store_bytes=self.store.num_bytes,
        )
