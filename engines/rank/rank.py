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


def build_engine(command: BuildCommand, rank: int) -> Engine:
    """The engine that the instance names, imported only where it is used."""
    if command.instance.engine == "vllm":
        from prefect_rlhf.engines.vllm.engine import VllmEngine

        return VllmEngine(command, rank)
    from prefect_rlhf.engines.megatron.engine import MegatronEngine

    return MegatronEngine(command, rank)


def check_layout(engine: Engine, command: BuildCommand, rank: int) -> None:
    """Raise EngineFailed unless the engine holds what the command's layout says: all moves of weights rely on it."""
    held = {name: shard.region for name, shard in engine.weights().items()}
    regions = command.layout.regions
    for name in sorted(held.keys() | regions.keys()):
        stated = regions.get(name, {}).get(rank)
        if held.get(name) != stated:
            raise EngineFailed(f"{command.instance.name} holds {held.get(name)} of {name}, its layout says {stated}")
    for name, shard in engine.weights().items():
        if shard.view.dtype != getattr(torch, command.model.dtype):
            found = f"holds {name} as {shard.view.dtype}"
            raise EngineFailed(f"{command.instance.name} {found}, its model says {command.model.dtype}")


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

    def build(self, command: BuildCommand) -> RankReport:
        """Make the instance's engine and load its weights: version 0, or that of a checkpoint. Collective."""
        began = time.perf_counter()
        engine = self._engine_factory(command, self.rank)
        check_layout(engine, command, self.rank)
        if command.restore is not None:
            restore(cast(TrainingEngine, engine), command.restore.folder)
        resident = self._residents[command.instance] = LoadedModel(engine, command)
        version = command.restore.version if command.restore else 0
        return self._report(began, resident, digest=resident.written(version))

    def open_dataset(self, source: RowSource) -> None:
        """Make the dataset's rows readable here, under its name."""
        self._datasets[source.name] = source

    def generate(self, command: CallCommand) -> RankReport:
        """Continue this replica's prompts. Keeps `tokens`, `prompt_length` and `logprobs` of its rows."""
        began, resident = time.perf_counter(), self._begin(command)
        assert command.sampling is not None  # a generate command has it
        prompts = read_prompts(command, self._datasets)
        engine = cast(GenerationEngine, resident.engine)
        made = engine.generate(prompts, command.sampling, row_seeds(command), command.micro_batches)
        tokens = [torch.tensor([*p, *r]) for p, r in zip(prompts, made.tokens, strict=True)]
        self._keep(command, "tokens", tokens)
        self._keep(command, "prompt_length", [torch.tensor(len(prompt)) for prompt in prompts])
        self._keep(command, "logprobs", [torch.tensor(row, dtype=torch.float32) for row in made.logprobs])
        lengths = tuple(map(len, tokens))
        return self._report(
            began, resident, command=command, num_tokens=sum(map(len, made.tokens)), row_lengths=lengths
        )

    def inference(self, command: CallCommand) -> RankReport:
        """Run the model over this replica's rows. Keeps `command.output` where the engine returns it."""
        began, resident = time.perf_counter(), self._begin(command)
        inputs = self._inputs(command)
        sequences = inputs.sequences(command.doing)
        engine = cast(TrainingEngine, resident.engine)
        made = engine.infer(sequences, command.output, command.micro_batches, command.temperature)
        if made is not None:
            lengths = (sequences.lengths_B - sequences.prompt_lengths_B).tolist()
            self._keep(command, command.output, unpad(made.float().cpu(), lengths))
        return self._report(began, resident, command=command, num_tokens=int(sequences.lengths_B.sum()))

    def train_step(self, command: CallCommand) -> RankReport:
        """Take the optimizer steps of one train_step, after which the weights are version `command.writes`."""
        began, resident = time.perf_counter(), self._begin(command, "optimizer")
        assert command.train is not None and command.function is not None and command.writes is not None
        inputs = self._inputs(command)
        sequences = inputs.sequences(command.doing)
        engine = cast(TrainingEngine, resident.engine)
        metrics = engine.train(sequences, inputs.training_batch(sequences), command.function, command.train)
        tokens = int(sequences.lengths_B.sum()) * command.train.epochs
        digest = resident.written(command.writes)
        return self._report(began, resident, command=command, digest=digest, metrics=metrics, num_tokens=tokens)

    def compute(self, command: CallCommand) -> RankReport:
        """Run a computation on all rows of the step. Keeps its columns; its state waits for the next step."""
        began = time.perf_counter()
        assert command.function is not None
        inputs = self._inputs(command)
        evaluation = command.call.every is not None
        context = Context(
            command.step, command.run_dir, command.tokenizer, command.row_ids, command.versions, evaluation
        )
        with torch.no_grad():
            state = self._states.get(command.call.name)
            made: Computed = command.function(*inputs.batches, context=context, state=state)
        if command.call.stateful:
            self._states[command.call.name] = made.state
        for key, column in made.columns.items():
            self._keep(command, key, unpad(column, inputs.lengths_of(column)))
        return self._report(began, command=command, metrics=made.metrics)

    def transfer(self, command: TransferCommand) -> RankReport:
        """Send and receive this rank's part of the rows that a node moves."""
        began = time.perf_counter()
        return self._report(began, command=command, bytes_moved=exchange_rows(self.store, command, self.rank))

    def reallocate(self, command: MoveWeightsCommand) -> RankReport:
        """Bring a version from one instance's storage into another's; the digest is the target's."""
        began = time.perf_counter()
        source, target = self._residents.get(command.source), self._residents.get(command.target)
        doing = f"reallocate {command.source.name} to {command.target.name}"
        if source is not None:
            source.require(command.version, doing)
        read = None if source is None else source.engine
        write = None if target is None else target.engine
        moved = self._weight_mover.move(read, write, command)
        digest = target.written(command.version) if target is not None else None
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
        written = save(cast(TrainingEngine, resident.engine), resident.command, folder, self.rank)
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

    def _begin(self, command: CallCommand, part: OffloadPart | None = None) -> LoadedModel:
        assert command.instance is not None  # only compute has none
        resident = self._resident(command.instance, command.doing)
        resident.require(command.reads, command.doing, part)
        return resident

    def _resident(self, instance: ModelInstance, doing: str) -> LoadedModel:
        if instance not in self._residents:
            raise RlhfError(f"{doing}: {instance.name} was not built on this rank")
        return self._residents[instance]

    def _inputs(self, command: CallCommand) -> CallInputs:
        return read_call_inputs(command, self.store, self._datasets)

    def _keep(self, command: CallCommand, key: str, rows: Iterable[torch.Tensor]) -> None:
        self.store.put(command.step, command.call.name, key, dict(zip(command.rows, rows, strict=True)))

    def _report(
        self,
        began: float,
        *residents: LoadedModel,
        command: CallCommand | TransferCommand | None = None,
        digest: Digest | None = None,
        metrics: Mapping[str, float] | None = None,
        bytes_moved: int = 0,
        num_tokens: int = 0,
        row_lengths: tuple[int, ...] = (),
    ) -> RankReport:
        """What was done; the rows that nobody on this rank uses after `command` are freed first."""
        if command is not None:
            self.store.free(command.step, command.frees)
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
