"""Models by name: the exact shapes of popular models, from their config.json on the Hugging Face Hub."""

from collections.abc import Mapping
from difflib import get_close_matches
from types import MappingProxyType

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.models.families.known import FAMILIES
from prefect_rlhf.placement.models.model import Experts, RopeScaling, SlidingWindow, TransformerShape

_TABLE = """
llama     llama3-7b              4096  14336   32  32   8  128  128256    8192
llama     llama3-13b             5120  13824   40  40  40  128  128256    8192
llama     llama3-34b             8192  22016   48  64   8  128  128256    8192
llama     llama3-70b             8192  28672   80  64   8  128  128256    8192
llama     llama-7b               4096  11008   32  32  32  128   32000    4096
llama     llama-13b              5120  13824   40  40  40  128   32000    4096
llama     llama-34b              8192  22016   48  64   8  128   32000   16384
llama     llama-70b              8192  28672   80  64   8  128   32000    4096
llama     llama-33b              6656  17920   60  52  52  128   32000    2048
llama     llama-65b              8192  22016   80  64  64  128   32000    2048
llama     llama-3-8b             4096  14336   32  32   8  128  128256    8192
llama     llama-3-70b            8192  28672   80  64   8  128  128256    8192
llama3.1  llama-3.1-8b           4096  14336   32  32   8  128  128256  131072
llama3.1  llama-3.1-70b          8192  28672   80  64   8  128  128256  131072
llama3.1  llama-3.1-405b        16384  53248  126 128   8  128  128256  131072
llama3.1  llama-3.2-1b           2048   8192   16  32   8   64  128256  131072 tied
llama3.1  llama-3.2-3b           3072   8192   28  24   8  128  128256  131072 tied
llama3.1  llama-3.3-70b          8192  28672   80  64   8  128  128256  131072
qwen2     qwen2-0.5b              896   4864   24  14   2   64  151936  131072 tied
qwen2     qwen2-1.5b             1536   8960   28  12   2  128  151936  131072 tied
qwen2     qwen2-7b               3584  18944   28  28   4  128  152064  131072
qwen2     qwen2-72b              8192  29568   80  64   8  128  152064  131072
qwen2     qwen2-0.5b-instruct     896   4864   24  14   2   64  151936   32768 tied
qwen2     qwen2-1.5b-instruct    1536   8960   28  12   2  128  151936   32768 tied
qwen2     qwen2-7b-instruct      3584  18944   28  28   4  128  152064   32768
qwen2     qwen2-72b-instruct     8192  29568   80  64   8  128  152064   32768
qwen2     qwen2.5-0.5b            896   4864   24  14   2   64  151936   32768 tied
qwen2     qwen2.5-1.5b           1536   8960   28  12   2  128  151936  131072 tied
qwen2     qwen2.5-3b             2048  11008   36  16   2  128  151936   32768 tied
qwen2     qwen2.5-7b             3584  18944   28  28   4  128  152064  131072
qwen2     qwen2.5-14b            5120  13824   48  40   8  128  152064  131072
qwen2     qwen2.5-32b            5120  27648   64  40   8  128  152064  131072
qwen2     qwen2.5-72b            8192  29568   80  64   8  128  152064  131072
qwen2     qwen2.5-1.5b-instruct  1536   8960   28  12   2  128  151936   32768 tied
qwen2     qwen2.5-7b-instruct    3584  18944   28  28   4  128  152064   32768
qwen2     qwen2.5-14b-instruct   5120  13824   48  40   8  128  152064   32768
qwen2     qwen2.5-32b-instruct   5120  27648   64  40   8  128  152064   32768
qwen2     qwen2.5-72b-instruct   8192  29568   80  64   8  128  152064   32768
qwen2     qwen2.5-math-1.5b      1536   8960   28  12   2  128  151936    4096 tied
qwen2     qwen2.5-math-7b        3584  18944   28  28   4  128  152064    4096
qwen3     qwen3-0.6b             1024   3072   28  16   8  128  151936   40960 tied
qwen3     qwen3-1.7b             2048   6144   28  16   8  128  151936   40960 tied
qwen3     qwen3-4b               2560   9728   36  32   8  128  151936   40960 tied
qwen3     qwen3-8b               4096  12288   36  32   8  128  151936   40960
qwen3     qwen3-14b              5120  17408   40  40   8  128  151936   40960
qwen3     qwen3-32b              5120  25600   64  64   8  128  151936   40960
qwen3     qwen3-0.6b-base        1024   3072   28  16   8  128  151936   32768 tied
qwen3     qwen3-1.7b-base        2048   6144   28  16   8  128  151936   32768 tied
qwen3     qwen3-4b-base          2560   9728   36  32   8  128  151936   32768 tied
qwen3     qwen3-8b-base          4096  12288   36  32   8  128  151936   32768
qwen3     qwen3-14b-base         5120  17408   40  40   8  128  151936   32768
mistral   mistral-7b-v0.1        4096  14336   32  32   8  128   32000   32768
mistral   mistral-7b-v0.2        4096  14336   32  32   8  128   32000   32768
mistral   mistral-7b-v0.3        4096  14336   32  32   8  128   32768   32768
mistral   mistral-7b             4096  14336   32  32   8  128   32768   32768
mistral   mistral-nemo-2407      5120  14336   40  32   8  128  131072  131072
mistral   mistral-small-24b-2501 5120  32768   40  32   8  128  131072   32768
mixtral   mixtral-8x7b           4096  14336   32  32   8  128   32000   32768 2/8
mixtral   mixtral-8x22b          6144  16384   56  48   8  128   32768   65536 2/8
qwen3_moe qwen3-30b-a3b          2048    768   48  32   4  128  151936   40960 8/128
qwen3_moe qwen3-235b-a22b        4096   1536   94  64   4  128  151936   40960 8/128
qwen3_moe qwen3-30b-a3b-base     2048    768   48  32   4  128  151936   32768 8/128
qwen3_moe qwen3-30b-a3b-2507     2048    768   48  32   4  128  151936  262144 8/128
qwen3_moe qwen3-235b-a22b-2507   4096   1536   94  64   4  128  151936  262144 8/128
gemma     gemma-2b               2048  16384   18   8   1  256  256000    8192 tied
gemma     gemma-7b               3072  24576   28  16  16  256  256000    8192 tied
gemma2    gemma-2-2b             2304   9216   26   8   4  256  256000    8192 tied
gemma2    gemma-2-9b             3584  14336   42  16   8  256  256000    8192 tied
gemma2    gemma-2-27b            4608  36864   46  32  16  128  256000    8192 tied
gemma3    gemma-3-270m            640   2048   18   4   1  256  262144   32768 tied
gemma3    gemma-3-1b             1152   6912   26   4   1  256  262144   32768 tied
gemma3    gemma-3-4b             2560  10240   34   8   4  256  262208  131072 tied
gemma3    gemma-3-12b            3840  15360   48  16   8  256  262208  131072 tied
gemma3    gemma-3-27b            5376  21504   62  32  16  128  262208  131072 tied
"""
"""Kind, name, hidden, feed-forward, layers, heads, key-value heads, width of a head, vocabulary, context, `tied`; of a
mixture of experts feed-forward is the width of one, and the last says how many of how many each token takes.

The first four are ReaL's (appendix table 1), the next Llama 2 and Code Llama as HybridFlow has them, and the first
Llama's larger sizes, which APP uses. Of Gemma 3 it is the text model.
"""
_OF_KIND: Mapping[str, tuple[str, float]] = MappingProxyType(
    {"llama": ("meta-llama", 1e4), "llama3.1": ("meta-llama", 5e5), "qwen2": ("qwen", 1e6), "qwen3": ("qwen", 1e6)}
    | {"mixtral": ("mistralai", 1e6), "qwen3_moe": ("qwen", 1e6)}
    | {"mistral": ("mistralai", 1e6), "gemma": ("google", 1e4), "gemma2": ("google", 1e4), "gemma3": ("google", 1e6)}
)
"""Organisation on the Hub, and the base of rotary embeddings."""
_FAMILY_OF_KIND = {"llama3.1": "llama", "gemma3": "gemma3_text"}
_NOT_RUN = {"mistral-7b-v0.1": "sliding_window 4096"} | dict.fromkeys(
    ("gemma-3-4b", "gemma-3-12b", "gemma-3-27b"), "Gemma3ForConditionalGeneration, which sees pictures"
)
_ALIASES = {f"llama-2-{size}": f"llama-{size}" for size in ("7b", "13b", "70b")}
_ALIASES["mixtral-8x7b-v0.1"] = "mixtral-8x7b"
_DECORATIONS = {"meta", "instruct", "thinking", "chat", "it", "base", "pt", "hf"}
"""Parts of a name that leave the shape as it is."""


def _shape(kind: str, name: str, row: list[str]) -> TransformerShape:
    family = FAMILIES[_FAMILY_OF_KIND.get(kind, kind)]
    hidden, inner, layers, heads, kv_heads, head_dim, vocab, context = map(int, row[:8])
    local_layers = tuple(layer for layer in range(layers) if (layer + 1) % 6)  # Gemma 3: five layers of six
    local_tokens = 512 if hidden < 2560 else 1024  # 512 in the models without pictures
    per_token, _, num_experts = row[-1].partition("/")  # 8/128: eight of 128
    return TransformerShape(
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_attention_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab,
        max_position_embeddings=context,
        rope_theta=5e5 if vocab == 128256 else _OF_KIND[kind][1],
        rms_norm_eps=1e-5 if kind in ("llama", "llama3.1", "mistral", "mixtral") else 1e-6,
        tied_embeddings="tied" in row,
        biases=family.always_biases,
        qk_norm=family.qk_norm,
        norms_after=family.norms_after,
        not_run=_NOT_RUN.get(name, family.not_run),
        family=family.model_type,
        window=SlidingWindow(local_tokens, local_layers, 1e4) if kind == "gemma3" else None,
        score_width=168 if name == "gemma-3-27b" else None,
        experts=Experts(int(num_experts), int(per_token)) if num_experts else None,
        rope_scaling=RopeScaling(32.0 if "3.2" in name else 8.0, 1.0, 4.0, 8192) if kind == "llama3.1" else None,
    )


_ROWS = [line.split() for line in _TABLE.strip().splitlines()]
_KINDS: Mapping[str, str] = MappingProxyType({name: kind for kind, name, *_ in _ROWS})
KNOWN_SHAPES: Mapping[str, TransformerShape] = MappingProxyType(
    {name: _shape(kind, name, row) for kind, name, *row in _ROWS}
)
"""Every shape by the short name of its model."""


def find_shape(name: str) -> TransformerShape | None:
    """Return a model's shape by its short name or Hub id; None for an unknown name.

    >>> find_shape("Qwen/Qwen2.5-7B") == find_shape("qwen2.5-7b"), find_shape("someone/Qwen2.5-7B")
    (True, None)
    >>> find_shape("meta-llama/Meta-Llama-3-8B-Instruct").max_position_embeddings
    8192
    """
    organisation, _, model = name.lower().rpartition("/")
    plain = "-".join(part for part in model.split("-") if part not in _DECORATIONS)
    for known in (model, plain, _ALIASES.get(plain, "")):
        if known in KNOWN_SHAPES and organisation in ("", _OF_KIND[_KINDS[known]][0]):
            return KNOWN_SHAPES[known]
    return None


def known_shape(name: str, field: str = "model", otherwise: str = "") -> TransformerShape:
    """Return a model's shape by name. Raises InvalidInput with similar names and other valid values.

    >>> known_shape("llama-7b").num_layers
    32
    """
    shape = find_shape(name)
    if shape is None:
        near = get_close_matches(name.lower().rpartition("/")[2], KNOWN_SHAPES, n=4, cutoff=0.5)
        like = ", ".join(near or ("llama-7b", "llama-3.1-8b", "qwen2.5-7b", "qwen3-8b", "mistral-7b", "gemma-2-9b"))
        raise InvalidInput(field, name, f"{otherwise}the name of a known model, such as {like}")
    return shape
