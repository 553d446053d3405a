"""Each engine's traits: its calls, its memory and its splits. Code asks for a trait, never for a name."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import cast

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.devices.mesh import Backend
from prefect_rlhf.placement.graph import CallKind
from prefect_rlhf.placement.models.model import Dtype
from prefect_rlhf.placement.plan import EngineKind


@dataclass(frozen=True, slots=True)
class HeadWidths:
    """The head widths that an engine's attention supports on a kind of device, in certain number formats.

    They are the `listed` widths and, if `least` is set, every even width from it on.

    >>> widths = HeadWidths("cuda", ("bfloat16",), (8, 16), least=32)
    >>> str(widths), [width in widths for width in (8, 24, 40)]
    ('8, 16, or 32 and more', [True, False, True])
    """

    backend: Backend
    dtypes: tuple[Dtype, ...]
    listed: tuple[int, ...] = ()
    least: int | None = None

    def __contains__(self, width: int) -> bool:
        return width in self.listed or (self.least is not None and width >= self.least)

    def __str__(self) -> str:
        numbers = [str(width) for width in self.listed]
        if self.least is not None:
            return ", or ".join((*filter(None, [", ".join(numbers)]), f"{self.least} and more"))
        return " or ".join((", ".join(numbers[:-1]), numbers[-1]))


@dataclass(frozen=True, slots=True)
class Release:
    """A release of an engine's package that a run accepts, and the packages of others that this release alone needs."""

    version: str
    libraries: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTraits:
    """Differences between engines that plans, layouts, costs and memory depend on.

    The default of each trait is the simplest engine: it holds weights and has no special ability.
    """

    serves: tuple[CallKind, ...]
    """The kinds of call that it runs."""
    engine_class: str = ""
    """`module:Class` of its class, which a rank makes of a BuildCommand and its own number; empty without weights."""
    preloads: tuple[str, ...] = ()
    """Modules that are imported once, before ranks are forked."""
    cpu_modules: tuple[str, ...] = ()
    """The same on cpu alone; only there are ranks forked."""
    cuda_modules: tuple[str, ...] = ()
    """Modules that a build on cuda imports too, some of them after minutes."""
    package: str = ""
    """The name for pip of its package, if a run accepts only some of its `releases`."""
    releases: tuple[Release, ...] = ()
    libraries: tuple[str, ...] = ()
    """Packages of others without which `preloads` cannot be imported, beside those of torch."""
    cuda_libraries: tuple[str, ...] = ()
    """The same of `cuda_modules`, where `libraries` does not have them."""
    cpu_system_libraries: tuple[str, ...] = ()
    """Shared libraries of the host that its code for CPU is linked with; no Python package has them."""
    holds_weights: bool = True
    """Whether its calls have a model; computations have no model and run on the host CPU."""
    micro_batches: bool = False
    """Whether a call runs in the micro-batches of its placement."""
    pipelines: bool = False
    """Whether a model may be split over pp."""
    recomputes: bool = False
    """Whether a train_step can run layers forward again during its backward, to keep fewer activations."""
    divides_sequences: bool = False
    """Whether a train_step can divide the tokens between products over tp."""
    plays: bool = False
    """Whether it continues rows turn by turn, as a play says."""
    plays_in_rounds: bool = False
    """Whether the rows of a play wait for each other's environments, and each turn begins with the row's whole prefill.
    Otherwise a row goes on when it has its answer, from the keys and values that it has."""
    paged_cache: bool = False
    """Whether it allocates a key-value cache of a fixed size when it is built, which limits the rows in flight."""
    sleeps_on_cuda: bool = False
    """Whether an offload on cuda unmaps its memory: the devices compute nothing meanwhile, and each process can offload
    a single instance."""
    drops_weights: bool = False
    """Whether its `offload` and `reload` take `copies`: False to free or allocate memory without a copy."""
    attends_by_torch: bool = False
    """Whether torch chooses its attention kernel on cuda, as placement/models/attention_kernel.py predicts."""
    replays_graphs: bool = False
    """Whether a decoding step on cuda replays captured CUDA graphs, which hold memory."""
    adapter_ranks: tuple[int, ...] = ()
    """The ranks of the slot that holds a model's adapter, in ascending order; it has the next one, and `slot_rank` says
    which. Empty: an adapter has memory of its own rank."""
    has_reduce_buffers: bool = False
    """Whether tensor parallelism on cuda has buffers of its own for sums over ranks, besides NCCL's."""
    tries_model: bool = False
    """Whether it runs a pass of the largest size when it is built on cuda."""
    packs_weights: bool = False
    """Whether it packs weights into another format for its products after each move of weights."""
    shares_weights: bool = False
    """Whether an instance can compute from frozen weights that another instance holds."""
    lends_weights: bool = False
    """Whether instances of another engine, which `shares_weights`, can compute from its frozen weights."""
    groups_heads: bool = False
    """Whether it sorts the rows of fused queries, keys and values by groups of heads, and not by kind."""
    adapts: bool = False
    """Whether it computes a model with an adapter."""
    dequantizes: bool = False
    """Whether it computes from a frozen base in four bits."""
    leaves_out: tuple[str, ...] = ()
    """The parts of a language model that it does not hold, since none of its calls uses them."""
    vocabulary_multiple: int | None = None
    """The vocabulary is padded to a multiple of this before tp splits it; None: to a multiple of tp."""
    head_widths: tuple[HeadWidths, ...] = ()
    """The widths of heads that it computes; empty: every even width."""
    start_seconds: float = 1.0
    """Seconds from the command to build an instance to an engine without weights. With a model of 20 million
    parameters on two busy CPU cores vLLM took 2.3 to 5.3 s and Megatron 0.2 to 0.5 s, six starts of each. Nothing was
    measured on cuda, where graphs are captured."""
    experts_over_tp: bool = False
    """Whether expert parallelism divides whole experts over all dp * tp devices. Otherwise ep divides them over
    replicas, and tp splits each expert."""
    words: tuple[str, ...] = ()
    """Names of registered words of placements that it offers (`register` in placement/words/table.py)."""


_TRAITS: dict[EngineKind, EngineTraits] = {
    "vllm": EngineTraits(
        serves=("generate",),
        engine_class="prefect_rlhf.engines.vllm.engine:VllmEngine",
        preloads=(
            "prefect_rlhf.engines.vllm",  # sets the environment that vllm reads at its import
            "vllm",
            "vllm.v1.engine.core",
            "vllm.model_executor.models.llama",
            "vllm.model_executor.models.qwen2",
            "vllm.model_executor.models.qwen3",
            "vllm.model_executor.models.gemma3",
        ),
        cpu_modules=("vllm.v1.worker.cpu_worker", "vllm.v1.worker.cpu_model_runner"),
        cuda_modules=(
            "torch._inductor.compile_fx",
            "vllm._custom_ops",
            "vllm.compilation.backends",
            "vllm.device_allocator.cumem",
            "vllm.distributed.device_communicators.cuda_communicator",
            "vllm.model_executor.warmup.kernel_warmup",
            "vllm.model_executor.warmup.minimax_m3_msa_warmup",
            "vllm.v1.attention.backends.flash_attn",
            "vllm.v1.attention.backends.triton_attn",
            "vllm.v1.worker.gpu.model_runner",
            "vllm.v1.worker.gpu.warmup",
            "vllm.v1.worker.gpu_worker",
            "vllm.vllm_flash_attn",
        ),
        libraries=(
            *("PIL", "aiohttp", "cachetools", "cbor2", "cloudpickle", "cpuinfo", "einops", "fastapi", "filelock"),
            *("huggingface_hub", "msgspec", "numpy", "openai", "openai_harmony", "packaging"),
            *("partial_json_parser", "prometheus_client", "psutil", "pybase64", "pydantic", "pydantic_core", "regex"),
            *("requests", "safetensors", "tqdm", "transformers", "typing_extensions"),
            *("urllib3", "uvloop", "xgrammar", "yaml", "zmq"),
        ),
        cuda_libraries=("torchvision", "triton"),  # its warm-up of kernels and the runner of our sampler
        cpu_system_libraries=("libnuma.so.1",),
        paged_cache=True,
        sleeps_on_cuda=True,
        drops_weights=True,
        plays=True,
        adapts=True,
        adapter_ranks=(1, 8, 16, 32, 64, 128, 256, 320, 512),
        replays_graphs=True,
        has_reduce_buffers=True,
        tries_model=True,
        packs_weights=True,
        lends_weights=True,
        leaves_out=("scalar_head",),
        vocabulary_multiple=64,
        head_widths=(
            HeadWidths("cpu", ("float32", "bfloat16"), (32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)),
            # FlashAttention takes multiples of 8 in bfloat16, Triton's attention takes 32 and more.
            HeadWidths("cuda", ("bfloat16",), (8, 16, 24), least=32),
            HeadWidths("cuda", ("float32",), least=32),
        ),
        start_seconds=3.0,
        experts_over_tp=True,
    ),
    "megatron": EngineTraits(
        serves=("generate", "inference", "train_step"),
        engine_class="prefect_rlhf.engines.megatron.engine:MegatronEngine",
        preloads=(
            "megatron.core.models.gpt.gpt_model",
            "megatron.core.optimizer",
            "megatron.core.distributed",
            "megatron.core.pipeline_parallel.schedules",
        ),
        package="megatron-core",
        # engines/megatron/core_versions.py has their differences. 0.19 imports Triton without requiring it.
        releases=(Release("0.16.1"), Release("0.19.2", ("triton",))),
        libraries=("numpy", "packaging"),
        micro_batches=True,
        plays=True,
        plays_in_rounds=True,
        pipelines=True,
        recomputes=True,
        divides_sequences=True,
        shares_weights=True,
        groups_heads=True,
        adapts=True,
        dequantizes=True,
        drops_weights=True,
        attends_by_torch=True,
    ),
    "python": EngineTraits(serves=("compute",), holds_weights=False),
}
TRAITS: Mapping[EngineKind, EngineTraits] = MappingProxyType(_TRAITS)
"""Every engine. Of engines that serve the same kind of call, the usual engine comes first."""


def register(name: str, traits: EngineTraits) -> None:
    """Add an engine that is not part of this package. Ranks receive its traits when they start.

    Raises InvalidInput for the name of an engine with other traits.
    """
    if TRAITS.get(cast(EngineKind, name), traits) != traits:
        raise InvalidInput("engine", name, f"a name other than {', '.join(TRAITS)}")
    _TRAITS[cast(EngineKind, name)] = traits


def refused_heads(engine: EngineKind, width: int, dtype: Dtype, backend: Backend) -> str:
    """Return why an engine cannot compute heads of this width on a kind of device; empty if it can.

    >>> refused_heads("vllm", 16, "float32", "cuda"), refused_heads("megatron", 16, "float32", "cuda")
    ('a head is 16 wide, and vllm on cuda in float32 takes 32 and more', '')
    """
    for widths in TRAITS[engine].head_widths:
        if widths.backend == backend and dtype in widths.dtypes and width not in widths:
            return f"a head is {width} wide, and {engine} on {backend} in {dtype} takes {widths}"
    return ""


def slot_rank(engine: EngineKind, rank: int) -> int | None:
    """Return the rank of the slot that an engine keeps an adapter in; None if the adapter's rank is too high.

    Rows beyond the adapter's rank are zero.

    >>> slot_rank("vllm", 4), slot_rank("vllm", 16), slot_rank("vllm", 600), slot_rank("megatron", 600)
    (8, 16, None, 600)
    """
    ranks = TRAITS[engine].adapter_ranks
    return next((each for each in ranks if each >= rank), None) if ranks else rank


def has_not_slept(engine: EngineKind, with_adapter: bool, backend: Backend) -> bool:
    """Whether an engine's offload on cuda is refused, because no GPU has shown yet that it restores the weights.

    >>> has_not_slept("vllm", True, "cuda"), has_not_slept("vllm", True, "cpu"), has_not_slept("megatron", True, "cuda")
    (True, False, False)
    """
    return TRAITS[engine].sleeps_on_cuda and backend == "cuda" and with_adapter


def engines_of(kind: CallKind) -> tuple[EngineKind, ...]:
    """Return the engines that can run a kind of call, the usual engine first."""
    return tuple(engine for engine, traits in TRAITS.items() if kind in traits.serves)
