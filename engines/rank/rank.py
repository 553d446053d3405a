"""A rank: a device's engines and rows. The controller calls its methods through the gang."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, cast

import torch

from prefect_rlhf.engines.commands import (
    BuildCommand,
    CallCommand,
    FollowCommand,
    MoveStateCommand,
    MoveWeightsCommand,
    RankReport,
    RowSource,
    StateRegion,
    TransferCommand,
)
from prefect_rlhf.engines.compute import Computed, Context
from prefect_rlhf.engines.engine import Engine, GenerationEngine, PlayingEngine, SharingEngine, TrainingEngine
from prefect_rlhf.engines.files.checkpoint_files import check_shard
from prefect_rlhf.engines.files.export import export
from prefect_rlhf.engines.files.saved_state import SavedState, decode, encode
from prefect_rlhf.engines.files.state_exchange import exchange_state
from prefect_rlhf.engines.files.training_state import HostCopy, restore, state_writer
from prefect_rlhf.engines.rank.choosing import choose
from prefect_rlhf.engines.rank.exchange_rows import exchange_rows
from prefect_rlhf.engines.rank.inputs import CallInputs, read_call_inputs, read_prompts, tokenizers_here, training_rows
from prefect_rlhf.engines.rank.loaded_model import LoadedModel
from prefect_rlhf.engines.rank.model_scores import within_bound
from prefect_rlhf.engines.rank.playing import play_rows
from prefect_rlhf.engines.rank.store import RowStore
from prefect_rlhf.engines.rows import unpad
from prefect_rlhf.engines.sampling.response_end import can_end, cut_rows, ends_of
from prefect_rlhf.engines.sampling.seeds import row_seeds
from prefect_rlhf.engines.weights.followed_weights import average
from prefect_rlhf.engines.weights.memory import (
    device_holders,
    gpu_memory,
    limit_torch,
    release_free_memory,
    resident_bytes,
)
from prefect_rlhf.engines.weights.move_weights import WeightMover
from prefect_rlhf.errors.errors import EngineFailed, InvalidInput, NotFinite, RlhfError
from prefect_rlhf.files.modules import import_from
from prefect_rlhf.files.storage.inputs import model_folder
from prefect_rlhf.files.storage.mirror import on_this_machine
from prefect_rlhf.files.storage.publish import publish
from prefect_rlhf.placement.engine_traits import TRAITS
from prefect_rlhf.placement.graph import CallKind
from prefect_rlhf.placement.layout.layout import Layout
from prefect_rlhf.placement.layout.lending import lent_parameters
from prefect_rlhf.placement.models.outputs import OUTPUTS
from prefect_rlhf.placement.models.weights import parameters
from prefect_rlhf.placement.plan import ModelInstance, OffloadPart


def build_engine(command: BuildCommand, rank: int) -> Engine:
    """Make the engine of the instance; the engine's module is imported only here."""
    engine: Engine = resolve_name(TRAITS[command.instance.engine].engine_class)(command, rank)
    return engine


def check_layout(engine: Engine, command: BuildCommand, rank: int) -> None:
    """Raise EngineFailed unless the engine holds the command's layout, because all moves of weights rely on it."""
    shards, regions, name_of_instance = engine.weights(), command.layout.regions, command.instance.name
    for name in sorted(shards.keys() | regions.keys()):
        held, stated = shards[name].region if name in shards else None, regions.get(name, {}).get(rank)
        if held != stated:
            raise EngineFailed(f"{name_of_instance} holds {held} of {name}, its layout says {stated}")
    dtypes: dict[str, str] = {one.name: one.dtype or command.model.dtype for one in parameters(command.model)}
    for name, shard in shards.items():
        if shard.view.dtype != getattr(torch, of_model := dtypes.get(name, command.model.dtype)):
            held_format = f"holds {name} as {shard.view.dtype}"
            raise EngineFailed(f"{name_of_instance} {held_format}, its model says {of_model}")


def _write_nothing(region: StateRegion, values: torch.Tensor) -> None:
    raise AssertionError(f"this rank has no engine for {region.kind} {region.parameter}")


def _to_be_saved(state: object, call: str) -> SavedState | InvalidInput:
    """Return a state in a checkpoint's form, or the error that makes it impossible, for the writer of a checkpoint."""
    try:
        return encode(state, call)
    except InvalidInput as error:
        return error


class Rank:
    """A rank process's models and rows, and the work done on them. Methods that do work return a RankReport."""

    def __init__(
        self, rank: int, size: int, engine_factory: Callable[[BuildCommand, int], Engine] = build_engine
    ) -> None:
        self.rank, self.size = rank, size
        self.store = RowStore()
        self.models: dict[ModelInstance, LoadedModel] = {}
        self._engine_factory = engine_factory
        self._datasets: dict[str, RowSource] = {}
        self._weight_mover = WeightMover(rank)
        self._states: dict[str, Any] = {}  # states of stateful computations for the next step, by call
        self._copies: dict[ModelInstance, HostCopy] = {}  # of the models trained here, for checkpoints

    def device_memory(self) -> tuple[int, int]:
        """Return its GPU's total and free bytes. Raises RuntimeError without a GPU."""
        free, total = torch.cuda.mem_get_info()
        return total, free

    def device_holders(self) -> str:
        """Return the processes on its GPU with their memory, as the driver lists them; empty without a list."""
        return device_holders(str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid))

    def limit_torch(self, num_bytes: int) -> None:
        """Limit torch to `num_bytes` of its GPU, so that the rest stays free for NCCL and the driver."""
        limit_torch(num_bytes)

    def build(self, command: BuildCommand) -> RankReport:
        """Make the instance's engine and load its weights: version 0, or a checkpoint's version. Collective."""
        began = time.perf_counter()
        local = model_folder(command.model.path, f"{command.model.role}.path")
        command = replace(command, model=replace(command.model, path=str(local)))
        engine = self._engine_factory(command, self.rank)
        self._lend(command, engine)
        check_layout(engine, command, self.rank)
        model = self.models[command.instance] = LoadedModel(engine, command)
        if command.restore is not None and command.restore.folder is None:
            model.is_empty = True
            return self._report(began, model)
        if command.restore is not None and command.restore.folder is not None:
            folders = [command.restore.folder / name for name in command.trained]
            restore(model.state, folders, command.frozen)
        digest = model.label(command.restore.version if command.restore else 0, whole=True)
        return replace(self._report(began, model), digest=digest)

    def _lend(self, command: BuildCommand, engine: Engine) -> None:
        """Give an engine the tensors of other instances that its command names."""
        lent = []
        for own in command.weights:
            if (owner := command.shared.get(own.name)) is not None:
                user = command.instance
                names = lent_parameters(own, command.model, user.engine, owner.engine, user.strategy.tp)
                lent.append((self._model(owner, f"build {user.name}").engine, names))
        if lent:
            cast(SharingEngine, engine).share(lent)

    def close_instances(self, closed: Sequence[ModelInstance]) -> RankReport:
        """Free all memory of instances on this rank. Copies of their training states stay on the host."""
        began = time.perf_counter()
        for instance in closed:
            if (model := self.models.pop(instance, None)) is not None:
                self._weight_mover.forget(instance)
                model.engine.close()
                del model
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        release_free_memory()
        return self._report(began)

    def copied_state(self, instance: ModelInstance) -> tuple[int, tuple[StateRegion, ...]]:
        """Return the optimizer's number of steps, and the regions of the instance's copy in this rank's host memory."""
        num_updates, parts = self._copies[instance].copied
        return num_updates, tuple(StateRegion(part.kind, part.parameter, part.region) for part in parts)

    def move_state(self, command: MoveStateCommand) -> tuple[RankReport, tuple[StateRegion, ...]]:
        """Do this rank's part of a training state's move; return the optimizer regions that it still lacks.

        After the last part the weights have a digest.
        """
        began, model = time.perf_counter(), self.models.get(command.target)
        held = self._copies[command.source].copied[1] if command.source in self._copies else ()
        if model is None:  # this rank only gives
            bytes_moved = exchange_state(command.moves, self.rank, held, _write_nothing)
            return replace(self._report(began), bytes_moved=bytes_moved), ()
        state, digest = model.state, None
        lacking: tuple[StateRegion, ...] = ()
        bytes_moved = exchange_state(command.moves, self.rank, held, state_writer(state, command.is_last))
        if command.is_last:
            digest = model.label(command.version, whole=True)
        else:
            state.weights_written()
            state.begin_after(command.num_updates)
            lacking = tuple(StateRegion(part.kind, part.parameter, part.region) for part in state.state_parts())
        return replace(self._report(began, model), digest=digest, bytes_moved=bytes_moved), lacking

    def drop_copies(self, instances: Sequence[ModelInstance]) -> RankReport:
        """Free the copies of training states in host memory."""
        began = time.perf_counter()
        for instance in instances:
            if (copy := self._copies.pop(instance, None)) is not None:
                copy.close()
        release_free_memory()
        return self._report(began)

    def open_dataset(self, source: RowSource) -> None:
        """Make the dataset's rows readable on this rank, under its name."""
        self._datasets[source.name] = source

    def run_call(self, command: CallCommand) -> RankReport:
        """Run a call with the method of its kind."""
        methods: Mapping[CallKind, Callable[[CallCommand], RankReport]] = {
            "generate": self.generate,
            "inference": self.inference,
            "train_step": self.train_step,
            "compute": self.compute,
        }
        return methods[command.call.kind](command)

    def generate(self, command: CallCommand) -> RankReport:
        """Continue this replica's prompts. Keeps `tokens`, `prompt_length`, `logprobs` and `truncated` of its rows.

        Metrics: `kept_mass` (see Generated) and `truncated`, the share of cut rows (see `cut_rows`), unless only its
        length can end a response. With a play, see `play_rows`.
        """
        began, model = time.perf_counter(), self._model_of(command)
        assert command.sampling is not None  # a generate command has it
        prompts = read_prompts(command, self.store, self._datasets)
        if command.play is not None:
            return self._play(command, model, prompts, began)
        engine = cast(GenerationEngine, model.engine)
        generated = engine.generate(prompts, command.sampling, row_seeds(command), command.micro_batches)
        tokens = [torch.tensor([*p, *r]) for p, r in zip(prompts, generated.tokens, strict=True)]
        self._keep(command, "tokens", tokens)
        self._keep(command, "prompt_length", [torch.tensor(len(prompt)) for prompt in prompts])
        self._keep(command, "logprobs", [torch.tensor(row, dtype=torch.float32) for row in generated.logprobs])
        cut = cut_rows(generated.tokens, command.sampling, ends_of(model.command), model.command.model.path)
        if "truncated" in command.call.outputs:  # else nobody would free it
            self._keep(command, "truncated", [torch.tensor(each, dtype=torch.uint8) for each in cut])
        report = self._report(began, model, command=command)
        num_tokens = sum(map(len, generated.tokens))
        metrics = {} if generated.kept_mass is None else {"kept_mass": generated.kept_mass}
        if cut and can_end(command.sampling):
            report = replace(report, metric_rows={"truncated": len(cut)})
            metrics |= {"truncated": sum(cut) / len(cut)}
        return replace(report, num_tokens=num_tokens, row_lengths=tuple(map(len, tokens)), metrics=metrics)

    def _play(
        self, command: CallCommand, model: LoadedModel, prompts: Sequence[Sequence[int]], began: float
    ) -> RankReport:
        """Play this replica's rows. Keeps further keys: `mask`, `turn`, `turn_rewards`, `scores` and `truncated`."""
        played = play_rows(command, cast(PlayingEngine, model.engine), prompts, self._datasets)
        for key, rows in played.columns.items():
            self._keep(command, key, rows)
        lengths = tuple(map(len, played.columns["tokens"]))
        num_tokens = sum(map(len, played.columns["logprobs"]))
        report = self._report(began, model, command=command)
        return replace(
            report, num_tokens=num_tokens, row_lengths=lengths, metrics=played.metrics, metric_rows=played.metric_rows
        )

    def inference(self, command: CallCommand) -> RankReport:
        """Run the model over this replica's rows. Keeps `command.output` on ranks with an engine that returns it.

        Metric for scores: `failed`, the share of rows without a score; see `within_bound`.
        """
        began, model = time.perf_counter(), self._model_of(command)
        sequences = self._inputs(command).sequences(command.doing)
        engine = cast(TrainingEngine, model.engine)
        output = engine.infer(sequences, command.output, command.micro_batches, command.temperature)
        metrics, metric_rows = {}, {}
        if output is not None:
            lengths = (sequences.lengths_B - sequences.prompt_lengths_B).tolist()
            made = output.float().cpu()
            rows = list(made) if OUTPUTS[command.output].per == "row" else unpad(made, lengths)
            if command.output == "scores":
                rows, failed = within_bound(command, rows)
                metrics, metric_rows = {"failed": failed}, {"failed": len(rows)}
            self._keep(command, command.output, rows)
        report, num_tokens = self._report(began, model, command=command), int(sequences.lengths_B.sum())
        return replace(report, num_tokens=num_tokens, metrics=metrics, metric_rows=metric_rows)

    def train_step(self, command: CallCommand) -> RankReport:
        """Take the optimizer steps of a train_step; afterwards the weights are version `command.writes`."""
        began, model = time.perf_counter(), self._model_of(command, "optimizer")
        assert command.train is not None and command.writes is not None
        rows = [training_rows(command, each, self.store, self._datasets) for each in command.passes]
        engine = cast(TrainingEngine, model.engine)
        try:
            metrics = engine.train(rows, command.train)
        except NotFinite as error:
            raise NotFinite(f"{command.doing}: {error}") from error
        digest = model.label(command.writes)
        num_tokens = sum(int(each.sequences.lengths_B.sum()) for each in rows) * command.train.epochs
        report = self._report(began, model, command=command)
        return replace(report, digest=digest, metrics=metrics, num_tokens=num_tokens)

    def compute(self, command: CallCommand) -> RankReport:
        """Run a computation on all rows of the step. Keeps its columns; its state waits for the next step.

        If no input row was kept, it does not run.
        """
        began, name = time.perf_counter(), command.call.name
        command = replace(command, tokenizers=tokenizers_here(command.tokenizers))
        assert command.function is not None
        inputs = self._inputs(command)
        tokenizer = command.tokenizers.of_call(command.call, command.generated_by)
        origin = command.versions, command.generated_by, command.tokenizers.folders
        context = Context(command.step, command.run_dir, tokenizer, command.row_ids, *origin)
        computed = Computed(state=self._states.get(name))
        if command.rows or not command.call.rows.choices:
            with torch.no_grad():
                computed = command.function(*inputs.batches, context=context, state=self._states.get(name))
        chosen = None
        if command.call.chooses is not None:
            chosen = choose(command, computed.columns.get("keep", ()))
            computed = Computed({}, {**computed.metrics, **chosen.metrics})
        state = None
        if command.call.stateful:
            self._states[name] = computed.state
            state = _to_be_saved(computed.state, name)
        for key, column in computed.columns.items():
            rows = unpad(column, inputs.lengths_of(column)) if isinstance(column, torch.Tensor) else column
            self._keep(command, key, rows)
        report = self._report(began, command=command)
        chosen_rows = chosen.rows if chosen else ()
        return replace(report, metrics=computed.metrics, state=state, chosen_rows=chosen_rows)

    def transfer(self, command: TransferCommand) -> RankReport:
        """Send and receive this rank's part of the rows that a node moves."""
        began = time.perf_counter()
        bytes_moved = exchange_rows(self.store, command, self.rank)
        return replace(self._report(began, command=command), bytes_moved=bytes_moved)

    def reallocate(self, command: MoveWeightsCommand) -> RankReport:
        """Copy a version from an instance's storage into another's; the digest is the target's."""
        began = time.perf_counter()
        source, target = self.models.get(command.source), self.models.get(command.target)
        doing = f"reallocate {command.source.name} to {command.target.name}"
        if source is not None:
            source.require(command.version, doing)
        if target is not None:
            target.require_on_device(doing)
        reads, writes = (None if model is None else model.engine for model in (source, target))
        moved = self._weight_mover.move(reads, writes, command)
        digest = target.label(command.version) if target is not None else None
        report = self._report(began, *filter(None, (source, target)))
        extra_bytes = moved.peak_extra_bytes
        return replace(report, digest=digest, bytes_moved=moved.bytes_moved, peak_extra_bytes=extra_bytes)

    def follow(self, command: FollowCommand) -> RankReport:
        """Write a follower's next version, an average of its own and its leader's weights; return the digest."""
        began, move = time.perf_counter(), command.move
        source, target = self.models.get(move.source), self.models.get(move.target)
        doing = f"follow {move.source.name} by {move.target.name}"
        if source is not None:
            source.require(move.version, doing)
        if target is not None:
            target.require(command.held, doing)
        leader = None if source is None else source.engine
        moved = average(leader, None if target is None else target.followed, command, self._weight_mover)
        digest = target.label(move.version) if target is not None else None
        report = self._report(began, *filter(None, (source, target)))
        extra_bytes = moved.peak_extra_bytes
        return replace(report, digest=digest, bytes_moved=moved.bytes_moved, peak_extra_bytes=extra_bytes)

    def offload(self, instance: ModelInstance, part: OffloadPart = "all", copies: bool = True) -> RankReport:
        """Move an instance, or only its weights or optimizer, to host memory, or drop it.

        Runs concurrently with other instances' calls.
        """
        began = time.perf_counter()
        bytes_moved = self._model(instance, "offload").offload(part, copies)
        return replace(self._report(began), bytes_moved=bytes_moved)

    def reload(self, instance: ModelInstance, part: OffloadPart = "all", copies: bool = True) -> RankReport:
        """Restore offloaded tensors; all weights are hashed again. Runs concurrently with calls, like offload.

        Without `copies`, no weights exist that could be hashed or used until a reallocation writes them.
        """
        began, model = time.perf_counter(), self._model(instance, "reload")
        bytes_moved = model.reload(part, copies)
        if part == "optimizer" or not copies:  # the weights were not offloaded, and may be in use; or do not exist yet
            return replace(self._report(began), bytes_moved=bytes_moved)
        digest = model.label(model.version, whole=True)
        return replace(self._report(began, model), digest=digest, bytes_moved=bytes_moved)

    def export(
        self, instance: ModelInstance, path: Path, tokenizer: str | Path, layout: Layout, merge: bool = False
    ) -> RankReport:
        """Write a trained model, see `write_trained`. Collective over the ranks of `layout`; its first rank writes."""
        began, model = time.perf_counter(), self._model(instance, "export")
        model.require(model.version, f"export {path.name}")
        ends = model.command.end_tokens
        bytes_moved = export(model.engine, model.command.model, layout, path, tokenizer, self.rank, ends, merge)
        return replace(self._report(began, model), bytes_moved=bytes_moved)

    def checkpoint(self, instance: ModelInstance, version: int) -> RankReport:
        """Copy this rank's part of an instance's weights and optimizer into host memory."""
        began, model = time.perf_counter(), self._model(instance, "checkpoint")
        model.require(version, f"checkpoint of {instance.role} v{version}", "optimizer")
        copy = self._copies.setdefault(instance, HostCopy(model.command, self.rank))
        bytes_copied = copy.take(model.state)
        return replace(self._report(began, model), bytes_moved=bytes_copied)

    def commit(self, folder: Path, finished: Path) -> RankReport:
        """Write the copied state into the folder of a checkpoint that will become `finished`, through to the disk.

        Runs concurrently with calls.
        """
        began = time.perf_counter()
        files = [file for copy in self._copies.values() for file in copy.write(folder)]
        for file in (each for shard in files for each in (shard, shard.with_suffix(".json"))):
            publish(file, to=finished / file.relative_to(folder))
        bytes_written = sum(file.stat().st_size for file in files)
        return replace(self._report(began), bytes_moved=bytes_written)

    def check_shards(self, indexes: Sequence[tuple[str, Path]]) -> RankReport:
        """Compare shards with their checksums; each index comes with its weights' name."""
        began = time.perf_counter()
        bytes_read = sum(check_shard(on_this_machine(index.parent) / index.name, name) for name, index in indexes)
        return replace(self._report(began), bytes_moved=bytes_read)

    def restore_states(self, states: Mapping[str, SavedState], modules: Sequence[tuple[str, str]]) -> None:
        """Decode and keep `states`; importing `modules`, each a name and its file, registers their types."""
        for name, file in modules:
            import_from(name, file)
        self._states |= {name: decode(state) for name, state in states.items()}

    def _model_of(self, command: CallCommand, part: OffloadPart | None = None) -> LoadedModel:
        """Return the call's model if its weights are the version that the call reads and `part` is on the device."""
        assert command.instance is not None  # only compute is without an instance
        model = self._model(command.instance, command.doing)
        model.require(command.reads, command.doing, part)
        return model

    def _model(self, instance: ModelInstance, doing: str) -> LoadedModel:
        if instance not in self.models:
            raise RlhfError(f"{doing}: {instance.name} was not built on this rank")
        return self.models[instance]

    def _inputs(self, command: CallCommand) -> CallInputs:
        return read_call_inputs(command, self.store, self._datasets)

    def _keep(self, command: CallCommand, key: str, rows: Iterable[torch.Tensor]) -> None:
        self.store.put(command.step, command.call.name, key, dict(zip(command.rows, rows, strict=True)))

    def _report(
        self, began: float, *models: LoadedModel, command: CallCommand | TransferCommand | None = None
    ) -> RankReport:
        """Report time and memory of work with some models, once the rows that the command frees are gone."""
        if command is not None:
            self.store.free(command.step, command.frees)
        return RankReport(
            seconds=time.perf_counter() - began,
            fingerprint_seconds=sum(model.take_fingerprint_seconds() for model in models),
            device_bytes=sum(model.device_bytes() for model in self.models.values()),
            resident_bytes=resident_bytes(),
            store_bytes=self.store.num_bytes,
            gpu=gpu_memory(),
        )
