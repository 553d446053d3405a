"""The fingerprint is one number per parameter, whatever its format, layout and split; any change changes it."""

import hashlib
import struct
import time
from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from prefect_rlhf.engines.commands import Digest
from prefect_rlhf.engines.engine import Shard
from prefect_rlhf.engines.weights.fingerprint import Factors, Sample, digest, factors, name_factor
from prefect_rlhf.engines.weights.versions import Fingerprints, combined
from prefect_rlhf.errors.errors import StaleWeights
from prefect_rlhf.placement.devices.mesh import DeviceMesh
from prefect_rlhf.placement.devices.strategy import Strategy
from prefect_rlhf.placement.layout.layout import Layout
from prefect_rlhf.placement.models.weights import Parameter, Weights
from prefect_rlhf.placement.plan import ModelInstance
from tests.support.cases import examples
from tests.support.device import DEVICE
from tests.support.layouts import megatron_layout, vllm_layout
from tests.support.strategies import GEMMA3, QWEN2, QWEN3, model

pytestmark = pytest.mark.quick

M = 2**64


def splitmix64(state):
    """The published algorithm (Steele, Lea, Flood 2014), in plain integers."""
    z = state % M
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % M
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % M
    return z ^ (z >> 31)


def defined(name, tensor):
    """The definition, element by element in plain integers; only the factors come from the subject."""
    matrix = tensor[None] if tensor.dim() == 1 else tensor
    lanes = 8 // tensor.element_size()
    rows = [value % M for value in factors("row", matrix.shape[0]).tolist()]
    words = [value % M for value in factors("column", -(-matrix.shape[1] // lanes)).tolist()]
    total = 0
    for r, values in enumerate(matrix):
        for c, value in enumerate(values):
            total += bits_of(value) * rows[r] * words[c // lanes] << (8 * tensor.element_size() * (c % lanes))
    return total * name_factor(name) % M


def bits_of(value):
    """An element's bits by way of the number's own encoding: bfloat16 is the upper half of float32."""
    (bits,) = struct.unpack("<I", struct.pack("<f", float(value)))
    return bits >> 16 if value.dtype == torch.bfloat16 else bits


@st.composite
def split_tensors(draw):
    """A parameter and a tiling of it by rows and columns."""
    rows = draw(st.integers(0, 9))  # 0: a vector
    columns = draw(st.integers(1, 40))
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float32]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    shape = (rows, columns) if rows else (columns,)
    tensor = torch.randn(shape, generator=generator).to(dtype)
    regions = [()]
    for size in shape:
        cuts = sorted(draw(st.sets(st.integers(1, size - 1), max_size=3)) if size > 1 else [])
        spans = list(zip([0, *cuts], [*cuts, size], strict=True))
        regions = [(*region, span) for region in regions for span in spans]
    return tensor, regions


def shard(tensor, region, copy=True):
    part = tensor[tuple(slice(*span) for span in region)]
    return Shard(region, (part.clone() if copy else part).to(DEVICE))


@pytest.mark.gpu
@settings(max_examples=examples(200), deadline=None)
@given(split_tensors(), st.booleans())
def test_shards_add_up_to_the_definition(case, copy):
    """Any tiling, of copies or of views into the whole, gives the number that the definition gives."""
    tensor, regions = case
    parts = (digest({"w": shard(tensor, region, copy)})["w"] for region in regions)
    assert sum(parts) % M == defined("w", tensor)


def test_factors_are_splitmix64_made_odd():
    """The factor of index i is splitmix64's i-th output, with the last bit set."""
    seed = int.from_bytes(hashlib.blake2b(b"row", digest_size=8).digest(), "little")
    gamma = 0x9E3779B97F4A7C15
    expected = [splitmix64(seed + gamma * (i + 1)) | 1 for i in range(5)]
    assert [value % M for value in factors("row", 5).tolist()] == expected
    assert not set(factors("row", 4096).tolist()) & set(factors("column", 4096).tolist())


@pytest.mark.gpu
def test_a_view_that_splits_an_axis_counts_like_its_region():
    """Rows of a fused, permuted storage are read where they are: a query of [groups, rows, hidden]."""
    fused = torch.randn(3, 5, 8, 16).to(DEVICE, torch.bfloat16)  # groups, parts, rows, hidden
    view = fused[:, 1:3].flatten(1, 2)  # groups, 16 rows, hidden: not contiguous
    whole = view.reshape(48, 16).clone()
    region = ((0, 48), (0, 16))
    assert digest({"q": Shard(region, view)}) == digest({"q": Shard(region, whole)})
    assert digest({"q": Shard(region, whole)})["q"] == defined("q", whole.cpu())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_single_bit_counts(dtype):
    """Flipping any bit of any element changes the fingerprint; so do swapped rows, columns and names."""
    base = torch.randn(4, 8).to(DEVICE, dtype)
    region = ((0, 4), (0, 8))
    seen = {digest({"w": Shard(region, base)})["w"], digest({"v": Shard(region, base)})["v"]}
    changed = [base[[1, 0, 2, 3]], base[:, [0, 2, 1, 3, 4, 5, 6, 7]], base[:, [4, 5, 6, 7, 0, 1, 2, 3]]]
    integers = torch.int16 if dtype == torch.bfloat16 else torch.int32
    width = 16 if dtype == torch.bfloat16 else 32
    for bit in range(width):
        mask = torch.zeros(4, 8, dtype=torch.int64)
        mask[bit % 4, bit % 8] = 1 << bit
        changed.append((base.view(integers) ^ mask.to(DEVICE, integers)).view(dtype))
    for tensor in changed:
        seen.add(digest({"w": Shard(region, tensor.contiguous())})["w"])
    assert len(seen) == 2 + len(changed)


@pytest.mark.gpu
def test_a_sample_sees_another_version():
    """The sample of a whole matrix that moved by one part in a hundred differs; that of the same one does not."""
    weight = torch.randn(192, 64).to(DEVICE, torch.bfloat16)
    shards = {
        "w": Shard(((0, 192), (0, 64)), weight),
        "norm": Shard(((0, 6),), torch.randn(6).to(DEVICE, torch.bfloat16)),
    }
    taken = Sample(shards, "key")
    assert taken.changed(shards) == []
    weight *= 1.01
    assert taken.changed(shards) == ["w"]
    shards["norm"].view[3] += 1
    assert taken.changed(shards) == ["w", "norm"]
    assert Sample(shards, "key").changed(shards) == []


@pytest.mark.gpu
def test_a_sample_sees_a_tensor_in_place_of_another():
    """An engine may return other tensors than those that were sampled, with other weights or the same."""
    weight = torch.randn(192, 64).to(DEVICE)
    taken = Sample({"w": Shard(((0, 192), (0, 64)), weight)}, "key")
    assert taken.changed({"w": Shard(((0, 192), (0, 64)), weight + 1)}) == ["w"]
    assert taken.changed({"w": Shard(((0, 192), (0, 64)), weight.clone())}) == []


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_sample_reads_views_that_are_not_made_of_words(dtype):
    """Odd widths, odd starts, columns, and one part of a fused weight."""
    base = torch.randn(3, 70, 10).to(DEVICE, dtype)
    views = {"odd": base[0, :, :7], "shifted": base[0, :, 1:9], "columns": base[1].t(), "fused": base[:, 2:68]}
    shards = {name: Shard(tuple((0, size) for size in view.shape[-2:]), view) for name, view in views.items()}
    assert Sample(shards, "key").changed(shards) == []
    taken = [Sample(shards, str(i)) for i in range(200)]
    base[1, 5:40, 4] += 1
    assert {name for each in taken for name in each.changed(shards)} == {"columns", "fused"}


@pytest.mark.gpu
def test_a_sample_looks_at_every_row_under_some_key():
    """No row is out of reach of the keys."""
    weight = torch.zeros(128, 8, device=DEVICE)
    shards = {"w": Shard(((0, 128), (0, 8)), weight)}
    taken = [Sample(shards, str(i)) for i in range(1000)]
    for row in (0, 63, 64, 127):
        weight[row] = 1
        assert any(each.changed(shards) for each in taken)
        weight[row] = 0


def test_hashing_is_fast_enough():
    """34 million bfloat16 take well under a tenth of a second on one thread (0.012 s on an idle core)."""
    weight = torch.randn(16384, 2048).to(torch.bfloat16)
    shards, table = {"w": Shard(((0, 16384), (0, 2048)), weight)}, Factors()
    digest(shards, table)
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        digest(shards, table)
        seconds.append(time.perf_counter() - began)
    assert min(seconds) < 0.1


VLLM = ModelInstance("actor", "vllm", DeviceMesh(0, 1, 0, 2), Strategy(dp=2))
MEGATRON = ModelInstance("actor", "megatron", DeviceMesh(0, 1, 0, 2), Strategy(tp=2))
SHAPES = {"w": (4, 8), "norm": (8,)}
ACTOR = (Weights("actor", tuple(Parameter(name, shape) for name, shape in SHAPES.items()), trained=True),)
REPLICAS = Layout(SHAPES, {"w": {0: ((0, 4), (0, 8)), 1: ((0, 4), (0, 8))}, "norm": {0: ((0, 8),), 1: ((0, 8),)}})
HALVES = Layout(SHAPES, {"w": {0: ((0, 2), (0, 8)), 1: ((2, 4), (0, 8))}, "norm": {0: ((0, 8),), 1: ((0, 8),)}})


def weights(seed):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def digests(layout, held):
    """What each rank of a layout reports; `held` gives each rank's weights."""
    return {
        rank: Digest.of(
            digest({name: shard(held[rank][name], region) for name, region in layout.of_rank(rank).items()})
        )
        for rank in (0, 1)
    }


def test_a_versions_layouts_agree():
    """A version learnt from halves is recognised in replicas, and is what the definition gives."""
    known, v0 = Fingerprints(), weights(0)
    known.settle(MEGATRON, ACTOR, 0, digests(HALVES, [v0, v0]), HALVES)
    known.settle(VLLM, ACTOR, 0, digests(REPLICAS, [v0, v0]), REPLICAS)
    assert known.content("actor", 0) == {name: defined(name, tensor) for name, tensor in v0.items()}


@settings(max_examples=examples(40), deadline=None)
@given(
    shape=st.sampled_from([QWEN2, QWEN3, GEMMA3]),
    heads=st.sampled_from([(4, 4), (4, 2), (4, 1)]),
    degrees=st.sampled_from([(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)]),
    engine=st.sampled_from([megatron_layout, vllm_layout]),
)
def test_every_family_has_the_same_fingerprint_under_any_layout(shape, heads, degrees, engine):
    """Copies of key-value heads, of norms and of a tied embedding count once, and biases like their matrices."""
    queries, keys = heads
    tp, pp = degrees[0], degrees[1] if engine is megatron_layout else 1
    tiny = {"hidden_size": 8, "intermediate_size": 8, "head_dim": 4, "vocab_size": 9, "num_layers": 3}
    shape = replace(shape, num_attention_heads=queries, num_kv_heads=keys, **tiny)
    layout = engine(model("actor", shape=shape), Strategy(1, tp, pp), tuple(range(tp * pp)))
    generator = torch.Generator().manual_seed(tp)
    whole = {name: torch.randn(size, generator=generator) for name, size in layout.shapes.items()}
    held = {
        rank: Digest.of(digest({name: shard(whole[name], region) for name, region in layout.of_rank(rank).items()}))
        for rank in range(tp * pp)
    }
    assert combined(VLLM, layout, held) == {name: defined(name, tensor) for name, tensor in whole.items()}


def test_an_engine_that_leaves_a_parameter_out_is_held_to_the_others():
    """Whoever comes first: what it lacks is learnt of the next, and held against those after it."""
    known, v0 = Fingerprints(), weights(0)
    without = Layout({"w": SHAPES["w"]}, {"w": REPLICAS.regions["w"]})
    known.settle(VLLM, ACTOR, 0, digests(without, [v0, v0]), without)
    known.settle(MEGATRON, ACTOR, 0, digests(HALVES, [v0, v0]), HALVES)
    known.settle(VLLM, ACTOR, 0, digests(without, [v0, v0]), without)
    assert known.content("actor", 0) == {name: defined(name, tensor) for name, tensor in v0.items()}
    other = v0 | {"norm": torch.zeros(8)}
    with pytest.raises(StaleWeights, match=r"first in norm"):
        known.settle(MEGATRON, ACTOR, 0, digests(HALVES, [other, other]), HALVES)
    v1 = weights(1)
    known.settle(MEGATRON, ACTOR, 1, digests(HALVES, [v1, v1]), HALVES)
    with pytest.raises(StaleWeights, match="holds the content of v0, expected v1"):
        known.settle(VLLM, ACTOR, 1, digests(without, [v0, v0]), without)


def test_an_older_version_is_named():
    """Content that is an older version's is called by that version's number."""
    known = Fingerprints()
    for version in (2, 3):
        held = weights(version)
        known.settle(MEGATRON, ACTOR, version, digests(HALVES, [held, held]), HALVES)
    with pytest.raises(StaleWeights, match="actor.vllm n0:0-1 dp2 holds the content of v2, expected v3"):
        known.settle(VLLM, ACTOR, 3, digests(REPLICAS, [weights(2), weights(2)]), REPLICAS)


def test_only_versions_that_may_be_asked_for_are_kept():
    """A run's memory does not grow with its steps; the last version before is still called by its number."""
    known, held = Fingerprints(), {version: weights(version) for version in range(5)}
    known.learn("reference", 0, {"w": 1})
    for version, tensors in held.items():
        known.settle(MEGATRON, ACTOR, version, digests(HALVES, [tensors, tensors]), HALVES)
        known.forget_before(version)
    assert sorted(known._learned) == [("actor", 3), ("actor", 4), ("reference", 0)]
    with pytest.raises(StaleWeights, match="holds the content of v3, expected v4"):
        known.settle(VLLM, ACTOR, 4, digests(REPLICAS, [held[3], held[3]]), REPLICAS)


def test_unknown_content_names_a_parameter():
    """Content of no version names the first parameter that differs."""
    known, v1 = Fingerprints(), weights(1)
    known.settle(MEGATRON, ACTOR, 1, digests(HALVES, [v1, v1]), HALVES)
    other = v1 | {"norm": torch.zeros(8)}
    with pytest.raises(StaleWeights, match=r"holds other content than v1 \(first in norm\), expected v1"):
        known.settle(VLLM, ACTOR, 1, digests(REPLICAS, [other, other]), REPLICAS)


def test_replicas_must_agree():
    """Two ranks whose copies differ are named with the parameter."""
    with pytest.raises(StaleWeights, match="ranks 0 and 1 hold different copies of w"):
        Fingerprints().settle(VLLM, ACTOR, 0, digests(REPLICAS, [weights(0), weights(1)]), REPLICAS)


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize(("name", "other"), [("w", {0: 2, 1: 3, 2: 0, 3: 1}), ("norm", {0: 1, 1: 0, 2: 0, 3: 0})])
def test_the_differing_rank_is_named(rank, name, other):
    """Of two replicas of halves every half is there twice and the norm four times; `other` is who else has it."""
    halves = [((0, 2), (0, 8)), ((2, 4), (0, 8))]
    layout = Layout(SHAPES, {"w": dict(enumerate(2 * halves)), "norm": dict.fromkeys(range(4), ((0, 8),))})
    held = {at: {"w": at % 2, "norm": 5} for at in range(4)}
    assert combined(VLLM, layout, {at: Digest.of(values) for at, values in held.items()}) == {"w": 1, "norm": 5}
    held[rank][name] += 1
    first, second = sorted((rank, other[rank]))
    with pytest.raises(StaleWeights, match=f"ranks {first} and {second} hold different copies of {name}"):
        combined(VLLM, layout, {at: Digest.of(values) for at, values in held.items()})


def test_a_missing_report_is_told():
    """A rank of the layout that gave no digest is an error, not a gap."""
    v0 = weights(0)
    with pytest.raises(StaleWeights, match="rank 1 gave no digest of w"):
        Fingerprints().settle(VLLM, ACTOR, 0, {0: digests(REPLICAS, [v0, v0])[0]}, REPLICAS)
