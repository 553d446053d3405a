"""A probe: speeds of products, copies, messages and decoding steps of leased devices, in place of a datasheet's claims.

It takes seconds; a profile takes minutes. It does not time a run's own models, so it holds for every model.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from math import ceil, inf, log2

from prefect_rlhf.engines.gang.open import NO_GPU, open_gang
from prefect_rlhf.engines.gang.processes.preload import modules_of
from prefect_rlhf.engines.gang.processes.trial_imports import try_imports
from prefect_rlhf.engines.rank.profiling.profiling_rank import ProfilingRank
from prefect_rlhf.placement.cost.datasheets.hardware import FEW_ROWS, Hardware
from prefect_rlhf.placement.cost.sizes import ModelSizes
from prefect_rlhf.placement.cost.speeds import Speeds
from prefect_rlhf.placement.cost.times.roofline import DatasheetTimes
from prefect_rlhf.placement.devices.mesh import Backend
from prefect_rlhf.placement.engine_traits import TRAITS
from prefect_rlhf.placement.models.engine_constants import GRADIENT_BYTES, ITEM_BYTES
from prefect_rlhf.placement.models.families.llama import LLAMA
from prefect_rlhf.placement.models.model import Dtype, TransformerShape
from prefect_rlhf.placement.plan import EngineKind
from prefect_rlhf.tasks.profiling.bench import Bench, Sizes, bench_of

REPEATS = 15
TOKENS = (256, 1024)  # of the two products
MANY_ROWS = 64  # of a decoding step; Megatron's products of more may be computed in another format, vLLM's are not
COLUMNS = 1024
COPIED_BYTES = 32 << 20
SHARED_PARAMETERS = 1 << 21  # sums of gradients and their gathered weights
SMALL_MESSAGE_BYTES = 1 << 12
ROWS, CONTEXT = 8, 32  # of decoding
LEAST_LAYER_SECONDS = 1e-6
"""A layer's constant if its sizes alone explain the measured seconds."""
MODEL_SHAPE = TransformerShape(
    hidden_size=256,
    intermediate_size=768,
    num_layers=4,
    num_attention_heads=4,
    num_kv_heads=4,
    head_dim=64,
    vocab_size=512,
    max_position_embeddings=128,
    rope_theta=10000.0,
    rms_norm_eps=1e-5,
    tied_embeddings=True,
    family=LLAMA.model_type,
)
"""A model whose decoding steps consist almost only of launches, so that its weights hardly matter."""
LAYER_SHAPE = replace(
    MODEL_SHAPE, hidden_size=512, intermediate_size=1536, num_layers=2, num_attention_heads=8, num_kv_heads=8
)
"""A model whose layers are wide enough for products to reach their speed, and small enough for a probe."""
TRAINED_ROWS, TRAINED_LENGTH = (3, 24), 32  # of the two micro-batches through its layers: far apart, against noise


def import_as_ranks(kind: Backend, engines: Sequence[EngineKind]) -> int:
    """Import ranks' modules with `engines` in another process; return their number. Raises EngineFailed."""
    modules = modules_of(engines, kind)
    try_imports(modules, NO_GPU if kind == "cpu" else {})
    return len(modules)


def probe(
    kind: Backend,
    num_devices: int,
    dtype: Dtype,
    engines: Sequence[EngineKind],
    hardware: Hardware,
    *,
    num_nodes: int = 1,
    node_devices: Sequence[str] = (),
    gpus: Sequence[int] | None = None,
) -> Speeds:
    """Measure on all devices of a node at once, for some seconds after the ranks' imports.

    `hardware` is the node's datasheet. `gpus` are the GPUs' numbers, as `open_gang` takes them. A decoding step is
    timed with each of `engines`. If there are several nodes, the first is measured. Raises the errors of ranks.
    """
    gang = open_gang(
        (num_devices,),
        rank_factory=ProfilingRank,
        device=kind,
        engines=engines,
        through_ray=num_nodes > 1 or bool(node_devices),
        node_devices=node_devices[:1],
        in_process=False,
        gpus=gpus,
        environment=_threads(kind, num_devices),
    )
    with closing(gang), bench_of(gang, MODEL_SHAPE, dtype, lambda _: None, kind) as bench:
        speeds = _device_speeds(bench, dtype)
        if kind == "cpu":  # a GPU's decoding is limited by its memory
            speeds = _decoding_speeds(bench, speeds)
        reached = speeds.on(hardware)
        seconds = {engine: _layer_seconds(bench, engine, reached) for engine in engines}
        speeds = replace(speeds, megatron_layer_seconds=seconds.get("megatron"), vllm_layer_seconds=seconds.get("vllm"))
        if kind == "cpu" and any(
            "train_step" in TRAITS[engine].serves for engine in engines
        ):  # a GPU's element-wise kernels wait for its memory
            wide = replace(bench, model=replace(bench.model, path=f"{bench.model.path}-wide", shape=LAYER_SHAPE))
            speeds = replace(speeds, elementwise_bytes_per_second=_elementwise_speed(wide, speeds.on(hardware)))
    return speeds


def _threads(kind: Backend, num_devices: int) -> dict[str, str]:
    """Return the environment of the ranks: a run on a single CPU device uses all cores, unlike a rank process."""
    return {"OMP_NUM_THREADS": str(os.cpu_count())} if (kind, num_devices) == ("cpu", 1) else {}


def _device_speeds(bench: Bench, dtype: Dtype) -> Speeds:
    """Measure products, copies, and messages between devices. The slowest device counts."""
    product_flops, busy = _product_flops(bench, TOKENS, dtype)
    copies = (bench.all(method, COPIED_BYTES, REPEATS) for method in (ProfilingRank.copy, ProfilingRank.copy_to_host))
    copied, to_host = (max(work.seconds for work in by_rank) for by_rank in copies)
    speeds = Speeds(
        dtype=dtype,
        product_flops=product_flops,
        memory_bytes_per_second=2 * COPIED_BYTES / copied,
        host_bytes_per_second=COPIED_BYTES / to_host,
        busy=busy,
    )
    if (size := bench.gang.size) == 1:
        return speeds
    shared = max(bench.all(ProfilingRank.share, SHARED_PARAMETERS, size, REPEATS))
    small = max(bench.all(ProfilingRank.all_reduce, SMALL_MESSAGE_BYTES, size, REPEATS))
    sent = (size - 1) / size * SHARED_PARAMETERS * (GRADIENT_BYTES + ITEM_BYTES["bfloat16"])
    return replace(speeds, link_bytes_per_second=sent / shared, link_latency_seconds=small / ceil(log2(size)))


def _decoding_speeds(bench: Bench, speeds: Speeds) -> Speeds:
    """Add the FLOP/s of products of FEW_ROWS tokens, and of the tokens beyond these.

    A product has a part that does not grow with its tokens, as the packing of its weights.
    """
    few, many = (tokens / _product_flops(bench, (tokens,), speeds.dtype)[0] for tokens in (FEW_ROWS, MANY_ROWS))
    flops, most = FEW_ROWS / few, speeds.product_flops
    further = min(most, (MANY_ROWS - FEW_ROWS) / (many - few)) if many > few else most
    return replace(speeds, decoding_flops=flops, further_rows_flops=max(flops, further))


def _product_flops(bench: Bench, sizes: Sequence[int], dtype: Dtype) -> tuple[float, float]:
    """Return the FLOP/s of products of these numbers of tokens, and the largest busy share."""
    products = [bench.all(ProfilingRank.multiply, tokens, COLUMNS, dtype, REPEATS) for tokens in sizes]
    seconds = sum(max(work.seconds for work in by_rank) for by_rank in products)
    return 2 * sum(sizes) * COLUMNS**2 / seconds, max(work.busy for by_rank in products for work in by_rank)


def _layer_seconds(bench: Bench, engine: EngineKind, hardware: Hardware) -> float:
    """Return a layer's time in a decoding step beyond the time for its weights, cache and products, in seconds.

    If the engine replays CUDA graphs, it counts the embedding and the last norm as a part of the layers.
    """
    bench.build(engine, Sizes(ROWS, CONTEXT))
    measured = bench.time(ProfilingRank.generate, engine, ROWS, CONTEXT).decode / MODEL_SHAPE.num_layers
    sizes = ModelSizes.of(bench.model)
    times, graphs = DatasheetTimes.of(sizes, hardware, engine), bench.replays(engine)
    counted = times.decode(ROWS, CONTEXT, 1, cuda_graphs=graphs)
    return max(LEAST_LAYER_SECONDS, measured - counted.total + counted.launch)


def _elementwise_speed(bench: Bench, hardware: Hardware) -> float:
    """Return the bytes per second of a layer's element-wise work with which the estimate of its training is right.

    Two sizes of micro-batch are timed. Launches and sums of gradients are the same for both, so that the difference
    consists of products and element-wise work.
    """
    bench.call(ProfilingRank.write_model, {0: (bench.model,)})
    bench.build("megatron", Sizes(max(TRAINED_ROWS), TRAINED_LENGTH))
    by_rows = [bench.time(ProfilingRank.train_worked, "megatron", rows, TRAINED_LENGTH) for rows in TRAINED_ROWS]
    bench.call(ProfilingRank.remove_model, {0: (bench.model,)})
    few, many = (passes.forward + passes.backward for passes in by_rows)
    measured = (many - few) / LAYER_SHAPE.num_layers
    times = DatasheetTimes.of(ModelSizes.of(bench.model), hardware)
    products = _counted_difference(replace(times, elementwise_share=inf))
    left = max(measured - products, LEAST_LAYER_SECONDS)
    return min(times.links.device, times.elementwise * (_counted_difference(times) - products) / left)


def _counted_difference(times: DatasheetTimes) -> float:
    """Return how much longer the estimate has the larger of the two micro-batches in a layer."""
    few, many = (
        times.forward(rows, TRAINED_LENGTH, 1).total + times.backward(rows, TRAINED_LENGTH, 1).total
        for rows in TRAINED_ROWS
    )
    return many - few
