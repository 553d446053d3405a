"""A build command and sampling settings in vLLM's terms."""

from collections.abc import Sequence

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams

from prefect_rlhf.engines.commands import BuildCommand
from prefect_rlhf.engines.engine import SamplingSettings
from prefect_rlhf.engines.sampling.sampler import stream_seed
from prefect_rlhf.engines.vllm.adapter import adapter_arguments
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.cost.paged_cache import check_cache, pass_tokens, rows_at_once, whole_cache_bytes
from prefect_rlhf.placement.cost.sizes import ModelSizes
from prefect_rlhf.placement.devices.mesh import Backend
from prefect_rlhf.placement.engine_traits import has_not_slept, refused_heads
from prefect_rlhf.placement.models.engine_constants import CACHE_BLOCK


def engine_arguments(command: BuildCommand, ranks: Sequence[int], executor: type) -> EngineArgs:
    """Describe an engine on `ranks` for the command's rows, within the room of its cache; eager only on CPU.

    A row without room waits, and the latest of the rows that outgrow the cache is preempted. On CPU a prompt is not cut
    into chunks: the number drawn after a chunk would have to be put back, which CPU generators cannot do. Rows with an
    equal beginning share the keys and values of their common whole blocks.
    """
    on_cuda = torch.cuda.is_available()
    length, rows, cache_bytes = command.max_sequence_length, command.max_rows, _cache_bytes(command)
    if on_cuda:
        sizes, tp = ModelSizes.of(command.model), command.instance.strategy.tp
        rows = rows_at_once(rows, cache_bytes, length, sizes, tp)
    return EngineArgs(
        model=command.model.path,
        load_format="dummy",  # the weights are read once, through our views
        skip_tokenizer_init=True,
        generation_config="vllm",  # a call's settings, not the folder's, decide sampling
        dtype=command.model.dtype,
        tensor_parallel_size=command.instance.strategy.tp,
        distributed_executor_backend=executor,
        enforce_eager=not (on_cuda and command.cuda_graphs),
        enable_sleep_mode=on_cuda and command.is_offloaded,  # a process can have a single engine that sleeps
        disable_custom_all_reduce=list(ranks) != sorted(ranks),  # it exchanges buffers in ascending order of ranks
        # Fused, the sum over ranks uses FlashInfer's buffer: see `settle`.
        compilation_config={"pass_config": {"fuse_allreduce_rms": False}} if on_cuda else {},
        max_model_len=length,
        max_num_seqs=rows,
        max_num_batched_tokens=pass_tokens(command.max_rows, length, rows),
        enable_chunked_prefill=on_cuda,
        kv_cache_memory_bytes=cache_bytes,
        block_size=None if on_cuda else CACHE_BLOCK,  # vLLM's own 128 exceed most prompts
        enable_prefix_caching=True,
        gpu_memory_utilization=0.01,  # has no other effect here, but vLLM refuses to start unless this share is free
        disable_hybrid_kv_cache_manager=True,  # layers with a window keep as much as others, as plans count
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
        seed=0,
        **adapter_arguments(command.model.adapter),
    )


def sampling_parameters(sampling: SamplingSettings, seed: int, end_tokens: tuple[int, ...]) -> SamplingParams:
    """Describe a row's sampling: token ids in and out, no text, and the sampled token's log-probability.

    A second log-probability slot carries the mass that top_k, top_p and min_p keep; see RowSampler.
    """
    return SamplingParams(
        max_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=stream_seed(seed),  # vLLM reads -1 as no seed
        stop_token_ids=list(end_tokens) if sampling.stop_at_eos else None,
        ignore_eos=not sampling.stop_at_eos,
        logprobs=int(sampling.is_filtered),
        detokenize=False,
    )


def check_command(command: BuildCommand) -> None:
    """Raise InvalidInput for a command that this engine cannot carry out."""
    if "lm" not in command.model.head:
        raise InvalidInput(f"{command.model.role}.head", command.model.head, "lm, to generate with vllm")
    if command.instance.strategy.pp != 1:
        raise InvalidInput(f"{command.instance.name}: pp", command.instance.strategy.pp, "1 with engine vllm")
    backend: Backend = "cuda" if torch.cuda.is_available() else "cpu"
    engine, model = command.instance.engine, command.model
    if reason := refused_heads(engine, model.shape.head_dim, model.dtype, backend):
        raise InvalidInput(f"{command.instance.name}: engine", engine, f"another for {model.path}: {reason}")
    if command.is_offloaded and has_not_slept(engine, model.adapter is not None, backend):
        raise InvalidInput(f"{command.instance.name}: offload", "all", "no offload with an adapter on cuda")
    sizes, tp = ModelSizes.of(command.model), command.instance.strategy.tp
    check_cache(command.instance.name, command.cache_bytes, command.max_sequence_length, sizes, tp)


def _cache_bytes(command: BuildCommand) -> int:
    """Return the bytes of the cache: the command's, or room for max_rows sequences of max_sequence_length at once."""
    if command.cache_bytes is not None:
        return command.cache_bytes
    sizes, tp = ModelSizes.of(command.model), command.instance.strategy.tp
    return whole_cache_bytes(command.max_rows, command.max_sequence_length, sizes, tp)
