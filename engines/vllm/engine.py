"""A model instance on a rank, in vLLM: generate, write new weights in place, offload and reload."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from vllm.v1.engine.llm_engine import LLMEngine

from prefect_rlhf.engines.commands import BuildCommand
from prefect_rlhf.engines.engine import (
    Conversed,
    Generated,
    PlayEnd,
    PlayTable,
    SamplingSettings,
    Shard,
    Turn,
)
from prefect_rlhf.engines.files.initial_adapter import fill_adapter
from prefect_rlhf.engines.files.tensor_files import OpenTensors
from prefect_rlhf.engines.sampling.conversation import PlayRow, conversed, in_rounds
from prefect_rlhf.engines.sampling.response_end import check_lengths, ends_of, stopped_turns
from prefect_rlhf.engines.sampling.stop_strings import StopStrings, stop_strings
from prefect_rlhf.engines.vllm.adapter import occupy, scaled_products, slots
from prefect_rlhf.engines.vllm.cpu.kernels import CpuKernels
from prefect_rlhf.engines.vllm.environment import inspect_here, survive_scan
from prefect_rlhf.engines.vllm.group import RankGroup
from prefect_rlhf.engines.vllm.requests import Requests, Response
from prefect_rlhf.engines.vllm.settings import check_command, engine_arguments, sampling_parameters
from prefect_rlhf.engines.vllm.weights import kept_beside, shards, unwritten
from prefect_rlhf.engines.weights.memory import storage_bytes
from prefect_rlhf.engines.weights.offload import HostCopies, HostLink, OffloadedTensors, empty
from prefect_rlhf.errors.errors import EngineFailed, InvalidInput
from prefect_rlhf.placement.models.families.known import FAMILIES
from prefect_rlhf.placement.plan import OffloadPart


class VllmEngine:
    """A GenerationEngine. Every rank of a tensor-parallel group builds it from the same command, makes the same calls.

    On CUDA vLLM captures its graphs (unless the command forbids it) and computes from the weights that `weights()`
    returns. On CPU it runs eagerly, and its matrix products read packed copies that the first generate after
    `weights_written()` makes: a fingerprint of `weights()` proves the source of the packed copies, not the packed
    copies themselves. A call refuses any other tensor that vLLM made of weights and kept.
    """

    def __init__(self, command: BuildCommand, rank: int) -> None:
        check_command(command)
        self.instance = command.instance
        self._max_length = command.max_sequence_length
        self._folder, self._end_tokens = command.model.path, ends_of(command)
        self._sleeps = command.is_offloaded  # on CUDA
        self._group = RankGroup(_tensor_parallel_ranks(command, rank), rank)
        survive_scan()
        inspect_here(FAMILIES[command.model.shape.family].architecture("lm"))
        adapter = command.model.adapter
        with scaled_products(adapter), self._group.building() as executor:
            self._llm = LLMEngine.from_engine_args(engine_arguments(command, self._group.ranks, executor))
        core = self._llm.engine_core
        core._finalizer.detach()  # it would destroy torch's world when this engine is collected
        self._requests = Requests(self._llm, self.instance.name)
        self._runner: Any = core.engine_core.model_executor.driver_worker.worker.model_runner
        self._adapter_request = None if adapter is None else occupy(self._runner)
        self._shards = shards(self._runner.get_model(), adapter)
        _check_layout(self._shards, command, rank)
        self._cpu = None if torch.cuda.is_available() else CpuKernels(self._runner)
        device = next(self._runner.get_model().parameters()).device
        self._offloaded = OffloadedTensors(device)  # on CPU
        self._host_copies = HostCopies(HostLink(device))  # on CUDA
        self._is_asleep = self._has_looked = False
        self._load(command)

    def weights(self) -> Mapping[str, Shard]:
        """The compute weights held here: views of vLLM's own storage."""
        return self._shards

    @property
    def layers(self) -> Sequence[torch.nn.Module]:
        """The transformer layers, for timing; the replay of CUDA graphs does not call them."""
        layers: Sequence[torch.nn.Module] = self._runner.get_model().model.layers
        return layers

    @property
    def forward_method(self) -> tuple[Any, str]:
        """The owner and the name of the method that runs all layers, also as a replayed CUDA graph, for timing."""
        return self._runner, "_model_forward"

    def weights_written(self) -> None:
        """Have the new weights packed before use on CPU; generate never reads keys and values of the old weights."""
        self._offloaded.written()
        self._host_copies.forget()
        if self._cpu is not None:
            self._cpu.weights_written()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingSettings,
        seeds: Sequence[int],
        micro_batches: int = 1,
    ) -> Generated:
        """Continue the prompts; a response ends with the end-of-sequence token if the model chose to stop, or a string.

        Rows without room in the cache begin as others end; there are no `micro_batches`.

        Rows with the same prompt, a group's, compute its whole cache blocks once. Nothing is shared with earlier calls,
        so that in bfloat16 too a call answers as it would in a resumed run.

        Log-probabilities cover the whole vocabulary at the temperature; a greedy response has the model's own, at
        temperature 1.
        """
        check_lengths(prompts, sampling, self._max_length)
        self._begin_call()
        stops = stop_strings(sampling.stop, self._folder)
        return self._continued(prompts, sampling, seeds, [sampling.max_new_tokens] * len(prompts), stops)

    @property
    def leads(self) -> bool:
        """See PlayingEngine."""
        return self._group.index == 0

    def converse(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingSettings,
        seeds: Sequence[int],
        table: PlayTable | None,
        micro_batches: int = 1,
        *,
        together: bool = False,
    ) -> Conversed:
        """See PlayingEngine.converse. Rows do not wait for each other: a row that has its answer joins the next step.

        Each turn is a request with all tokens so far. The prefix cache has the keys and values of their whole blocks,
        unless other rows needed the room.
        """
        self._begin_call()
        if together:
            return self._in_rounds(prompts, sampling, seeds, table)
        rows = [PlayRow(prompt, seed) for prompt, seed in zip(prompts, seeds, strict=True)]
        turns: dict[str, Turn] = {}  # by request
        stops, kept_masses = stop_strings(sampling.stop, self._folder), []
        while turns or any(row.end is None for row in rows):
            orders = self._group.told(None if table is None else table.orders("no" if turns else "any"))
            with self._group.entered():
                for order in orders:
                    if isinstance(order, PlayEnd):
                        rows[order.row].end = order
                    else:
                        row, of_turn = rows[order.row], replace(sampling, max_new_tokens=order.at_most)
                        seed = row.follow(order)
                        turns[self._request(row.context, of_turn, seed)] = order
                finished = self._requests.step(stops) if turns else {}
            for name, made in finished.items():
                turn, said = turns.pop(name), _generated([made], sampling)
                rows[turn.row].said(turn.number, said.tokens[0], said.logprobs[0])
                if said.kept_mass is not None:
                    kept_masses.append((said.kept_mass, len(said.tokens[0])))
                if table is not None:
                    (stopped,) = stopped_turns(said.tokens, [turn.at_most], sampling, self._end_tokens, stops)
                    table.heard(turn.row, said.tokens[0], stopped)
        return conversed(rows, kept_masses)

    def _in_rounds(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingSettings,
        seeds: Sequence[int],
        table: PlayTable | None,
    ) -> Conversed:
        stops = stop_strings(sampling.stop, self._folder)

        def generate(
            contexts: Sequence[Sequence[int]], turn_seeds: Sequence[int], at_most: Sequence[int]
        ) -> tuple[Generated, Sequence[bool]]:
            made = self._continued(contexts, sampling, turn_seeds, at_most, stops)
            return made, stopped_turns(made.tokens, at_most, sampling, self._end_tokens, stops)

        return in_rounds(prompts, seeds, table, self._group.told, generate)

    def _continued(
        self,
        contexts: Sequence[Sequence[int]],
        sampling: SamplingSettings,
        seeds: Sequence[int],
        at_most: Sequence[int],
        stops: StopStrings | None,
    ) -> Generated:
        """Continue each context by at most so many tokens, all to their ends."""
        finished: dict[str, Response] = {}
        with self._group.entered():
            names = [
                self._request(context, replace(sampling, max_new_tokens=most), seed)
                for context, seed, most in zip(contexts, seeds, at_most, strict=True)
            ]
            while self._requests:
                finished |= self._requests.step(stops)
        return _generated([finished[name] for name in names], sampling)

    def _begin_call(self) -> None:
        """Pack the newest weights, and drop the keys and values of earlier calls.

        Raises EngineFailed if some stay, and for a tensor that the model computes from and that was not written with
        the weights: neither a reallocation nor a fingerprint would reach it (see `_refuse_copies`).
        """
        if self._cpu is not None:
            self._cpu.pack()
        self._refuse_copies()
        if not self._llm.reset_prefix_cache():
            raise EngineFailed(f"{self.instance.name}: vLLM kept keys and values of an earlier call, expected none")

    def _refuse_copies(self) -> None:
        """Raise EngineFailed for a tensor that vLLM made of weights and kept.

        On CUDA, a tensor next to the parameters is a warning: no GPU has shown yet which tensors vLLM keeps there.
        """
        model, said = self._runner.get_model(), f"{self.instance.name}: vLLM computes from"
        expected = "a copy of its own, expected the weights that are written"
        if name := unwritten(model, self._shards):
            raise EngineFailed(f"{said} {name}, {expected}")
        if self._cpu is None and self._has_looked:
            return
        if name := kept_beside(model, self._shards):
            if self._cpu is not None:
                raise EngineFailed(f"{said} {name}, {expected}")
            logging.getLogger(__name__).warning("%s %s, which may be %s", said, name, expected)
        self._has_looked = True

    def _request(self, context: Sequence[int], sampling: SamplingSettings, seed: int) -> str:
        """Request tokens after a context; return the request's name."""
        return self._requests.add(context, sampling_parameters(sampling, seed, self._end_tokens), self._adapter_request)

    def device_bytes(self) -> int:
        """Bytes of weights, packed weights and key-value cache on the device now."""
        if self._is_asleep:
            return 0
        packed = 0 if self._cpu is None else self._cpu.num_bytes()
        return packed + storage_bytes([*self._weights(), *self._runner.get_model().buffers(), *self._runner.kv_caches])

    def offload(self, part: OffloadPart = "all", copies: bool = True) -> int:
        """Free weights, packed copies and key-value cache; return the bytes copied to host memory.

        On CUDA vLLM sleeps at level 2, which drops the weights and keeps buffers: level 1 would copy the weights each
        time. Not yet run on a GPU.
        """
        self._check_part(part)
        if self._is_asleep:
            return 0
        if self._cpu is None and not self._sleeps:
            raise EngineFailed(f"{self.instance.name} cannot be offloaded: it was built to stay on its device")
        self._is_asleep, model = True, self._runner.get_model()
        if self._cpu is not None:
            self._cpu.drop()
            return self._offloaded.offload(self._weights(), self._runner.kv_caches, list(model.buffers()), copies)
        bytes_copied = self._host_copies.save(self._weights()) if copies else 0
        with self._group.entered():
            self._llm.sleep(level=2)
        return bytes_copied

    def reload(self, part: OffloadPart = "all", copies: bool = True) -> int:
        """Bring the weights back, with an empty key-value cache; return the bytes copied from host memory."""
        self._check_part(part)
        if not self._is_asleep:
            return 0
        if self._cpu is None:
            with self._group.entered():
                self._llm.wake_up()
            bytes_copied = self._host_copies.load() if copies else 0
        else:
            bytes_copied = self._offloaded.reload(copies)
            if copies:
                self._cpu.pack()
        self._is_asleep = False
        return bytes_copied

    def close(self) -> None:
        """Free weights, packed copies and cache, and end the process groups.

        Memory of a vLLM that can sleep is not torch's: sleep is what frees it.
        """
        if self._cpu is not None:
            self._cpu.drop()
        if self._sleeps and self._cpu is None:
            self.offload(copies=False)
        else:
            empty([*self._weights(), *self._runner.get_model().buffers(), *self._runner.kv_caches])
        self._offloaded.close()
        self._host_copies.close()
        self._group.close()

    def _weights(self) -> list[Tensor]:
        model = self._runner.get_model()
        return [*model.parameters(), *slots(model)]

    def _check_part(self, part: OffloadPart) -> None:
        if part != "all":
            raise InvalidInput(f"{self.instance.name}: offload", part, "all: vLLM has no optimizer")

    def _load(self, command: BuildCommand) -> None:
        """Read this rank's regions out of the checkpoint; an adapter of the run is new."""
        of_adapter = fill_adapter(self._shards, command.model, command.seed)
        with OpenTensors(command.model.path, f"{command.model.role}.path") as tensors:
            for name, shard in self._shards.items():
                if name not in of_adapter:
                    shard.view.copy_(tensors.read(name, shard.region))
        self.weights_written()


def _generated(responses: Sequence[Response], sampling: SamplingSettings) -> Generated:
    """Return finished responses as tokens and log-probabilities, with the mass that filters kept."""
    tokens, shown = [response.tokens for response in responses], [response.shown for response in responses]
    if not responses or not sampling.is_filtered:
        return Generated(tokens, shown)
    kept_masses = [math.exp(value) for row in shown for value in row[1::2]]
    return Generated(tokens, [row[0::2] for row in shown], math.fsum(kept_masses) / len(kept_masses))


def _tensor_parallel_ranks(command: BuildCommand, rank: int) -> tuple[int, ...]:
    """Return this rank's replica: tp varies fastest over the command's ranks."""
    tp = command.instance.strategy.tp
    start = command.ranks.index(rank) // tp * tp
    return command.ranks[start : start + tp]


def _check_layout(held: Mapping[str, Shard], command: BuildCommand, rank: int) -> None:
    """Raise InvalidInput unless vLLM's shards match the command: weights would be written to the wrong place."""
    for name, region in command.layout.of_rank(rank).items():
        seen = held[name].region if name in held else None
        if seen != region:
            raise InvalidInput(f"{command.instance.name}: {name}", seen, f"region {region}, as in the layout")
