"""One model instance's vLLM engine on one rank: generate, take new weights in place, leave and re-enter device memory."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.inputs.engine import tokens_input
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine

from prefect_rlhf.engines.engine import Generated, SamplingSettings, Shard
from prefect_rlhf.engines.orders import BuildOrder
from prefect_rlhf.engines.vllm.checkpoint import eos_token_ids, load
from prefect_rlhf.engines.vllm.group import RankGroup
from prefect_rlhf.engines.vllm.weights import shards
from prefect_rlhf.placement.errors import InvalidInput

_BLOCK = 128  # tokens per block of the key-value cache on CPU; a multiple of those on CUDA
_MAX_BATCHED_TOKENS = 8192  # of one forward pass: prompts beyond it are prefilled in the next


class VllmEngine:
    """A GenerationEngine. Every rank of a tensor-parallel group builds it with the same order and makes the same calls.

    On CUDA vLLM captures its graphs unless the order says not to; on CPU it runs eagerly.
    """

    def __init__(self, order: BuildOrder, rank: int) -> None:
        _check(order)
        self.instance = order.instance
        self._max_length = order.max_sequence_length
        self._eos = eos_token_ids(order.model.path)
        self._request_ids = itertools.count()
        self._group = RankGroup(_tensor_parallel_ranks(order, rank), rank)
        with self._group.building() as executor:
            arguments = _arguments(order, executor)
            self._llm = LLMEngine.from_engine_args(arguments)
        core = self._llm.engine_core
        core._finalizer.detach()  # it would destroy torch's world when this engine is collected
        self._runner = core.engine_core.model_executor.driver_worker.worker.model_runner
        self._shards = shards(self._runner.get_model())
        load(order.model.path, self._shards)
        self.weights_written()

    def weights(self) -> Mapping[str, Shard]:
        """The compute weights held here: views of vLLM's own storage."""
        return self._shards

    def weights_written(self) -> None:
        """Forget the keys and values that the old weights made."""
        self._llm.reset_prefix_cache()

    def generate(self, prompts: Sequence[Sequence[int]], sampling: SamplingSettings, seeds: Sequence[int]) -> Generated:
        """Continue the prompts; a response ends with the end-of-sequence token if the model chose to stop.

        Log-probabilities are those of the distribution sampled from, after temperature and top_p; of a greedy response
        they are the model's own, at temperature 1.
        """
        self._check_lengths(prompts, sampling)
        first = next(self._request_ids)
        for prompt, seed in zip(prompts, seeds, strict=True):
            name = str(next(self._request_ids))
            self._llm.add_request(name, tokens_input(list(prompt)), self._parameters(sampling, seed))
        finished: dict[int, RequestOutput] = {}
        with self._group.entered(), torch.random.fork_rng():  # vLLM draws from the global generator too
            while self._llm.has_unfinished_requests():
                finished.update((int(output.request_id), output) for output in self._llm.step())
        answers = [finished[first + 1 + i].outputs[0] for i in range(len(prompts))]
        return Generated([list(a.token_ids) for a in answers], [list(a.logprobs.logprobs) for a in answers])

    def device_bytes(self) -> int:
        """Bytes of weights and key-value cache on the device now."""
        return sum(storage.nbytes() for storage in self._storages())

    def _storages(self) -> list[torch.UntypedStorage]:
        tensors = itertools.chain(self._runner.get_model().state_dict().values(), self._runner.kv_caches)
        return list({t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}.values())

    def _parameters(self, sampling: SamplingSettings, seed: int) -> SamplingParams:
        return SamplingParams(
            max_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            seed=seed % 2**63,  # torch's generators take no more, and vLLM reads -1 as no seed
            stop_token_ids=list(self._eos) if sampling.stop_at_eos else None,
            ignore_eos=not sampling.stop_at_eos,
            logprobs=0,  # that of the sampled token alone
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _check_lengths(self, prompts: Sequence[Sequence[int]], sampling: SamplingSettings) -> None:
        longest = max(map(len, prompts))
        if longest + sampling.max_new_tokens > self._max_length:
            limit = self._max_length - sampling.max_new_tokens
            raise InvalidInput(
                "prompts", f"{longest} tokens", f"at most {limit} before {sampling.max_new_tokens} new ones"
            )


def _check(order: BuildOrder) -> None:
    if order.model.head != "lm":
        raise InvalidInput(
            f"model {order.model.role}", order.model.head, "a language-model head, to generate with vllm"
        )
    if order.instance.strategy.pp != 1:
        raise InvalidInput(order.instance.name, f"pp {order.instance.strategy.pp}", "pp 1 with engine vllm")


def _tensor_parallel_ranks(order: BuildOrder, rank: int) -> tuple[int, ...]:
    """This rank's replica: tp varies fastest over the order's ranks."""
    tp = order.instance.strategy.tp
    start = order.ranks.index(rank) // tp * tp
    return order.ranks[start : start + tp]


def _arguments(order: BuildOrder, executor: type) -> EngineArgs:
    on_cuda = torch.cuda.is_available()
    length = order.max_sequence_length
    return EngineArgs(
        model=order.model.path,
        load_format="dummy",  # no reading twice: `load` fills the weights through our views
        skip_tokenizer_init=True,
        generation_config="vllm",  # sampling is as called for, not as the folder proposes
        dtype=order.model.dtype,
        tensor_parallel_size=order.instance.strategy.tp,
        distributed_executor_backend=executor,
        enforce_eager=not (on_cuda and order.cuda_graphs),
        enable_sleep_mode=on_cuda,
        max_model_len=length,
        max_num_seqs=order.max_rows,
        max_num_batched_tokens=max(length, min(order.max_rows * length, _MAX_BATCHED_TOKENS)),
        kv_cache_memory_bytes=_cache_bytes(order),
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
        seed=0,
    )


def _cache_bytes(order: BuildOrder) -> int:
    """Room for max_rows sequences of max_sequence_length at once, and vLLM's null block."""
    shape, tp = order.model.shape, order.instance.strategy.tp
    heads = max(1, shape.num_kv_heads // tp)
    itemsize = torch.finfo(getattr(torch, order.model.dtype)).bits // 8
    block_bytes = 2 * shape.num_layers * heads * shape.head_dim * itemsize * _BLOCK
    blocks_per_row = -(-order.max_sequence_length // _BLOCK) + 1
    return (order.max_rows * blocks_per_row + 1) * block_bytes
