"""A model with an adapter in Megatron, under every split, against peft on transformers."""

from dataclasses import replace

import adapter_cases
import family_cases
import megatron_cases as cases
import numpy as np
import pytest
import torch
from adapter_cases import ADAPTER
from megatron_cases import OPTIMIZER, Case
from test_megatron_ranks import LAYOUTS, last_stage
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from prefect_rlhf.placement.models.adapter import AdapterSpec
from tests.support.cases import combinations

pytestmark = pytest.mark.slow
CLOSE = 1e-5  # of the largest value
SPLITS = {"one": {"ranks": (0,)}, **LAYOUTS, "tp4": {"ranks": (0, 1, 2, 3), "tp": 4}}
KINDS = {"tied": {}, "untied": {"tied": False}, "scalar": {"scalar": True, "tied": False}}
WAYS = {"": {}, "tokens over tp": {"tokens_over_tp": True, "micro_batches": 2}, "recompute": {"recompute": 4}}
SOME = AdapterSpec(3, 6.0, ("k_proj", "up_proj", "down_proj"), rslora=True)
"""Of each fused layer a part, with the other scale, and a rank that nothing divides."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {kind: cases.make_folder(root / kind, **options) for kind, options in KINDS.items()}


def head_of(kind):
    return "scalar" if kind == "scalar" else "lm"


def transformers_model(folder, head="lm"):
    kind = AutoModelForSequenceClassification if head == "scalar" else AutoModelForCausalLM
    return kind.from_pretrained(folder, dtype=torch.float32)


def assert_outputs_and_gradients(world, case, model=None, close=CLOSE):
    """Outputs of the response tokens, each gradient and the norm of all, against a transformers model."""
    model, rows = model or transformers_model(case.folder, case.head), cases.make_rows(8)
    trained = adapter_cases.oracle(model, case.adapter)
    expected = cases.oracle_outputs(model, rows[0], case.head)
    found = world.run(case.ranks, adapter_cases.outputs, replace(case, optimizer=None))
    made = [found[place] for place in last_stage(case)]
    width = expected.shape[1]
    made = np.concatenate([np.pad(part, ((0, 0), (0, width - part.shape[1]))) for part in made])
    assert_close(made, expected.detach().numpy(), "outputs", close)
    values = cases.loss(expected, rows[1]).values
    ((values * rows[1]["mask"]).sum() / rows[1]["mask"].sum()).backward()
    case = replace(case, optimizer=family_cases.GRADIENT)
    stepped = world.run(case.ranks, adapter_cases.gradients, case)
    norm = float(torch.stack([parameter.grad.norm() for parameter in trained.values()]).norm())
    assert [each[1] for each in stepped] == pytest.approx([norm] * len(stepped), rel=1e-5)
    before, after = (adapter_cases.whole([each[place] for each in stepped], case) for place in (0, 2))
    largest = max(float(parameter.grad.abs().max()) for parameter in trained.values())
    for name, values in before.items():
        if name in trained:
            assert float(trained[name].grad.abs().max()) > 1e-4 * largest, name
            told = family_cases.gradients(values, after[name])
            assert np.abs(told - trained[name].grad.numpy()).max() <= close * max(1, largest), name
        else:
            assert np.array_equal(values, after[name]), f"{name} is frozen"


def assert_close(found, expected, what, close=CLOSE):
    assert np.abs(found - expected).max() <= close * max(1, np.abs(expected).max()), what


@pytest.mark.parametrize(
    ("kind", "split", "adapter"),
    combinations(
        KINDS,
        SPLITS,
        (ADAPTER, SOME),
        briefly=[
            ("tied", "dp2 tp2", ADAPTER),
            ("tied", "tp4", SOME),
            ("tied", "dp2 pp2", SOME),
        ],
    ),
)
def test_outputs_and_gradients_match_peft(world, folders, kind, split, adapter):
    """Of A, B and a scalar head; tp 4 holds each of two key-value heads twice."""
    assert_outputs_and_gradients(world, Case(folders[kind], head=head_of(kind), adapter=adapter, **SPLITS[split]))


@pytest.mark.parametrize(
    ("name", "split"),
    combinations(
        family_cases.OPTIONS,
        ("one", "tp2", "tp2 pp2", "dp2 tp2"),
        briefly=[("gemma3_text", "tp2 pp2"), ("qwen2", "tp2")],
    ),
)
def test_they_are_for_every_family(world, tmp_path, name, split):
    """Families with norms after a layer, biases, query norms or windows, and a key-value head that ranks copy."""
    folder = family_cases.make_family(tmp_path, name, kv_heads=1 if name in ("qwen2", "gemma3_text") else 6)
    assert_outputs_and_gradients(world, Case(folder, adapter=ADAPTER, **SPLITS[split]))


@pytest.mark.parametrize(
    ("kind", "split", "way"),
    combinations(
        KINDS,
        SPLITS,
        WAYS,
        briefly=[("tied", "tp2 pp2", "tokens over tp"), ("untied", "dp2 tp2", "recompute"), ("scalar", "dp2 tp2", "")],
    ),
)
def test_three_optimizer_steps_equal_peft_with_torchs_adamw(world, folders, kind, split, way):
    """Also where tp divides tokens, and where layers run forward again; what is frozen has no optimizer state."""
    case = Case(folders[kind], head=head_of(kind), adapter=ADAPTER, optimizer=OPTIMIZER, **SPLITS[split])
    settings = cases.Walk("values" if kind == "scalar" else "logprobs", 3, temperature=0.8, **WAYS[way])
    model = transformers_model(case.folder, case.head)
    trained = adapter_cases.oracle(model, ADAPTER)
    norms = cases.plain_training(model, case.head, settings, OPTIMIZER)
    found = world.run(case.ranks, adapter_cases.train, case, settings)
    assert all(each[0] == found[0][0] for each in found)
    assert found[0][0]["grad_norm"] == pytest.approx(np.mean(norms), rel=1e-5)
    whole = adapter_cases.whole([each[1] for each in found], case)
    for name, parameter in trained.items():
        np.testing.assert_allclose(whole[name], parameter.detach(), rtol=0, atol=1e-5, err_msg=name)
    assert set().union(*(each[3] for each in found)) == trained.keys()


def test_a_new_adapter_keeps_the_bases_outputs(world, folders):
    """Its outputs are those of the base to the bit, so that a reference on the same weights has a KL of exactly 0."""
    for split in ("one", "tp2", "pp2"):
        case = Case(folders["tied"], adapter=ADAPTER, **SPLITS[split])
        found, base = (
            world.run(each.ranks, cases.infer, each, "logprobs", 1, 1.0) for each in (case, adapter_cases.without(case))
        )
        assert np.array_equal(found[last_stage(case)[0]], base[last_stage(case)[0]]), split


def test_a_new_adapter_is_the_same_under_every_split(world, folders):
    """A is drawn whole, from the run's seed and its name, and then cut; B is zero."""
    found = {
        split: adapter_cases.whole(world.run(case.ranks, cases.load, case), case)
        for split in ("one", "tp4", "tp2 pp2", "dp2 tp2")
        for case in [Case(folders["tied"], adapter=ADAPTER, **SPLITS[split])]
    }
    one = {name: values for name, values in found["one"].items() if ".lora_" in name}
    assert len(one) == 2 * 7 * 4
    for name, values in one.items():
        assert all(np.array_equal(other[name], values) for other in found.values()), name
        bound = values.shape[1] ** -0.5
        if "lora_A" in name:
            assert 0.9 * bound < np.abs(values).max() <= bound and abs(values.mean()) < 0.2 * bound
        else:
            assert not values.any()
    drawn = [values.tobytes() for name, values in one.items() if "lora_A" in name]
    assert len(set(drawn)) == len(drawn), "no two are alike"


def test_only_trained_weights_have_gradients_and_optimizer_state(world, folders):
    """float32: weights, and of an adapter's a gradient, main weights (the weights themselves) and two moments."""
    case = Case(folders["untied"], adapter=ADAPTER, optimizer=OPTIMIZER)
    ((_, held, num_bytes, states),) = world.run((0,), adapter_cases.train, case, cases.Walk("logprobs", 3))
    sizes = {name: values.size for name, (_, values) in held.items()}
    trained = {name: size for name, size in sizes.items() if ".lora_" in name}
    assert states == trained.keys()
    counters = 4 * sum(1 for _ in trained)
    needed = 4 * sum(sizes.values()) + 12 * sum(trained.values())
    assert needed <= num_bytes <= needed + counters + 4096  # Megatron pads its buffers


def test_it_learns_alike_in_bfloat16(world, folders):
    """Its main weights are float32, and nothing of the base moves."""
    moved = {}
    for dtype in ("float32", "bfloat16"):
        case = Case(folders["tied"], dtype=dtype, adapter=ADAPTER, optimizer=replace(OPTIMIZER, weight_decay=0.0))
        ((metrics, held, *_),) = world.run((0,), adapter_cases.train, case, cases.Walk("logprobs", 3))
        assert np.isfinite(list(metrics.values())).all()
        (loaded,) = world.run((0,), cases.load, case)
        for name, (_, values) in held.items():
            if ".lora_" in name:
                start = adapter_cases.values(name, values.shape).numpy()
                moved.setdefault(dtype, []).append((values - start).flatten())
            else:
                assert np.array_equal(values, loaded[name][1]), name
    one, other = (np.concatenate(moved[dtype]) for dtype in ("float32", "bfloat16"))
    assert 0 < np.linalg.norm(one - other) < 0.3 * np.linalg.norm(one)
