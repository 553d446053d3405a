"""A frozen base in four bits in Megatron, under every split, against peft on transformers with the same numbers."""

from dataclasses import replace

import adapter_cases
import family_cases
import megatron_cases as cases
import numpy as np
import pytest
import torch
from adapter_cases import ADAPTER
from megatron_cases import OPTIMIZER, Case
from test_megatron_adapters import CLOSE, SPLITS, WAYS, assert_outputs_and_gradients, transformers_model
from test_megatron_ranks import last_stage

from prefect_rlhf.engines.files.quantized_base import as_in_four_bits
from prefect_rlhf.placement.models.adapter import AdapterSpec
from prefect_rlhf.placement.models.weights import quantized_matrices
from tests.support.cases import combinations

pytestmark = pytest.mark.slow
SOME = AdapterSpec(3, 6.0, ("k_proj", "up_proj"), rslora=True)
"""Two layers without an adapter, which have four bits too."""
FAMILIES = tuple(family_cases.OPTIONS)
BITS_CLOSE = 2 * CLOSE
"""With tp 4 a gradient is off by 1.13e-5 of the largest value on a processor without AVX-512, in float32."""


def folder_of(path, kind):
    """A model whose matrices every split cuts into whole blocks, under tp 4 too."""
    options = {"tied": kind == "tied", "scalar": kind == "scalar"}
    return cases.make_folder(path, hidden=256, heads=8, layers=2, **options)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {kind: folder_of(root / kind, kind) for kind in ("tied", "untied", "scalar")}


def quantized_oracle(case):
    """transformers' model with the numbers of four bits."""
    model = transformers_model(case.folder, case.head)
    named = dict(model.named_parameters())
    with torch.no_grad():
        for one in quantized_matrices(case.spec()):
            named[one.name].copy_(as_in_four_bits(named[one.name], case.dtype))
    return model


@pytest.mark.parametrize(
    ("kind", "split", "adapter"),
    combinations(
        ("tied", "untied", "scalar"),
        SPLITS,
        (ADAPTER, SOME),
        briefly=[("tied", "tp2 pp2", ADAPTER), ("scalar", "tp4", SOME)],
    ),
)
def test_outputs_and_gradients_are_those_of_peft_on_the_dequantised_base(world, folders, kind, split, adapter):
    """Of A, B and a scalar head. With tp 4, ranks hold the same key-value head."""
    head = "scalar" if kind == "scalar" else "lm"
    case = Case(folders[kind], head=head, adapter=adapter, base_dtype="nf4", **SPLITS[split])
    assert_outputs_and_gradients(world, case, quantized_oracle(case), BITS_CLOSE)


@pytest.mark.parametrize(
    ("split", "way"), combinations(SPLITS, WAYS, briefly=[("dp2 tp2", "tokens over tp"), ("one", "recompute")])
)
def test_three_steps_on_four_bits_equal_peft_with_torchs_adamw(world, folders, split, way):
    """Also where tp divides tokens, and where layers run forward again."""
    case = Case(folders["tied"], adapter=ADAPTER, optimizer=OPTIMIZER, base_dtype="nf4", **SPLITS[split])
    settings = cases.Walk("logprobs", 3, temperature=0.8, **WAYS[way])
    model = quantized_oracle(case)
    trained = adapter_cases.oracle(model, ADAPTER)
    cases.plain_training(model, case.head, settings, OPTIMIZER)
    found = world.run(case.ranks, adapter_cases.train, case, settings)
    whole = adapter_cases.whole([each[1] for each in found], case)
    for name, parameter in trained.items():
        np.testing.assert_allclose(whole[name], parameter.detach(), rtol=0, atol=CLOSE, err_msg=name)


def test_every_split_holds_the_same_bits(world, folders):
    """Pairs, scales and the scales' scales are the whole matrix's, cut."""
    found = {
        split: adapter_cases.whole(world.run(case.ranks, cases.load, case), case)
        for split in ("one", "tp4", "tp2 pp2", "dp2 tp2")
        for case in [Case(folders["untied"], adapter=ADAPTER, base_dtype="nf4", **SPLITS[split])]
    }
    one = found["one"]
    pairs = [name for name in one if f"{name}.absmax" in one]
    assert len(pairs) == 7 * 2
    for name, values in one.items():
        assert all(np.array_equal(other[name], values) for other in found.values()), name


def test_a_new_adapter_on_four_bits_changes_nothing(world, folders):
    """A reference in four bits has a KL of exactly 0, and another result than the base of the folder."""
    case = Case(folders["tied"], adapter=ADAPTER, base_dtype="nf4", **SPLITS["tp2"])
    bases = replace(case, adapter=None), replace(case, adapter=None, base_dtype=None)
    found, base, plain = (
        world.run(each.ranks, cases.infer, each, "logprobs", 1, 1.0)[last_stage(case)[0]] for each in (case, *bases)
    )
    assert np.array_equal(found, base)
    assert not np.array_equal(found, plain)


@pytest.mark.all
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_computes_from_four_bits(world, tmp_path, name):
    """Families with norms after a layer, biases, query norms or windows."""
    folder = family_cases.make_family(tmp_path, name, kv_heads=2)
    case = Case(folder, adapter=ADAPTER, base_dtype="nf4", **SPLITS["pp2"])
    assert_outputs_and_gradients(world, case, quantized_oracle(case), BITS_CLOSE)
