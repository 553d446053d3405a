"""The Megatron engine under every kind of parallelism, against transformers and plain PyTorch on the same rows."""

from dataclasses import replace

import megatron_cases as cases
import numpy as np
import pytest
import torch
from megatron_cases import OPTIMIZER, VOCAB, Case
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from prefect_rlhf.placement.devices.mesh import DeviceMesh
from prefect_rlhf.placement.devices.strategy import Strategy
from prefect_rlhf.placement.models.weights import parameters
from prefect_rlhf.placement.plan import ModelInstance
from tests.support.by_device import instance_holdings
from tests.support.cases import combinations, first
from tests.support.layouts import megatron_layout
from tests.support.strategies import call

pytestmark = pytest.mark.slow

LAYOUTS = {
    "dp2": {"ranks": (0, 1), "dp": 2},
    "tp2": {"ranks": (0, 1), "tp": 2},
    "pp2": {"ranks": (2, 3), "pp": 2},
    "pp2 on [3, 1]": {"ranks": (3, 1), "pp": 2},  # a strict subset, in falling order, while 0 and 2 are idle
    "dp2 tp2": {"ranks": (3, 0, 2, 1), "dp": 2, "tp": 2},
    "dp2 pp2": {"ranks": (0, 2, 1, 3), "dp": 2, "pp": 2},
    "tp2 pp2": {"ranks": (1, 0, 3, 2), "tp": 2, "pp": 2},
}
UNEVEN = {"pp2": LAYOUTS["pp2"], "pp4": {"ranks": (2, 0, 1, 3), "pp": 4}, "tp2 pp2": LAYOUTS["tp2 pp2"]}
CLOSE = {"rtol": 0, "atol": 2e-4}
KINDS = ("tied", "untied", "scalar")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {
        "tied": cases.make_folder(root / "tied"),
        "untied": cases.make_folder(root / "untied", tied=False),
        "three": cases.make_folder(root / "three", kv_heads=3, heads=6, hidden=96),
        "scalar": cases.make_folder(root / "scalar", scalar=True, layers=2, hidden=64, tied=False),
        "odd": cases.make_folder(root / "odd", layers=5, vocab=481),
        "odd untied": cases.make_folder(root / "odd_untied", layers=5, vocab=481, tied=False),
    }


def oracle(folder, head):
    kind = AutoModelForSequenceClassification if head == "scalar" else AutoModelForCausalLM
    return kind.from_pretrained(folder, dtype=torch.float32)


def last_stage(case):
    """Which ranks (by place in the mesh) return outputs, in the order of replicas."""
    coordinates = Strategy(case.dp, case.tp, case.pp).coordinates()
    return sorted(
        (i for i, c in enumerate(coordinates) if c.pp == case.pp - 1 and c.tp == 0), key=lambda i: coordinates[i].dp
    )


def outputs_of(world, case, output, micro_batches=1, temperature=1.0):
    """Outputs of all 8 rows, in order."""
    found = world.run(case.ranks, cases.infer, case, output, micro_batches, temperature)
    assert all((part is not None) == (i in last_stage(case)) for i, part in enumerate(found))
    width = max(found[i].shape[1] if found[i].ndim > 1 else 0 for i in last_stage(case))
    pad = [
        np.pad(p, ((0, 0), (0, width - p.shape[1]))) if p.ndim > 1 else p for p in (found[i] for i in last_stage(case))
    ]
    return np.concatenate(pad)


@pytest.mark.parametrize(
    ("layout", "kind"),
    combinations(LAYOUTS, KINDS[:2], briefly=[("dp2 tp2", "untied"), ("pp2 on [3, 1]", "tied")]),
)
def test_logprobs_equal_transformers(world, folders, layout, kind):
    """Log-probabilities of response tokens, whatever the split, micro-batches and temperature."""
    case = Case(folders[kind], **(LAYOUTS | UNEVEN)[layout])
    with torch.no_grad():
        expected = cases.oracle_outputs(oracle(folders[kind], "lm"), cases.make_rows(8)[0], "lm", 0.7)
    np.testing.assert_allclose(outputs_of(world, case, "logprobs", 2, 0.7), expected, **CLOSE)


@pytest.mark.parametrize(
    ("layout", "kind"), combinations(UNEVEN, ("odd", "odd untied"), briefly=[("pp4", "odd untied"), ("tp2 pp2", "odd")])
)
def test_stages_and_vocabularies_that_do_not_divide(world, folders, layout, kind):
    """5 layers over 2 or 4 stages, 481 tokens over tp 2: log-probabilities, gradients and weights as of the whole."""
    test_logprobs_equal_transformers(world, folders, layout, kind)
    test_three_steps_equal_a_plain_loop(world, folders, kind, layout, 2)
    test_weights_lie_where_the_layout_says(world, folders, kind, layout)


def test_padding_never_has_a_part_in_the_softmax(world):
    """9 tokens over tp 4 are 3, 3, 3 and none: padded rows, whatever they hold, change nothing and get no gradient."""
    for found, expected, padding_gradient in world.run((0, 1, 2, 3), cases.split_logprobs, 9, (0, 1, 2, 3)):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
        assert padding_gradient == 0


@pytest.mark.parametrize(("kind", "tp"), [("tied", 1), ("untied", 2), ("three", 3)])
def test_logits_equal_transformers(world, folders, kind, tp):
    """Logits, put together from the vocabulary slices of the ranks."""
    case = Case(folders[kind], ranks=tuple(range(tp)), tp=tp)
    found = np.concatenate(world.run(case.ranks, cases.logits, case), axis=-1)
    with torch.no_grad():
        expected = oracle(folders[kind], "lm")(cases.make_rows(8)[0].tokens_BS).logits
    assert found.shape[-1] == VOCAB
    real = cases.make_rows(8)[0]
    seen = torch.arange(real.tokens_BS.shape[1])[None] < real.lengths_B[:, None]
    np.testing.assert_allclose(found[seen], expected[seen], **CLOSE)


@pytest.mark.parametrize("layout", ["dp2", "tp2", "pp2"])
def test_values_and_scores_equal_transformers(world, folders, layout):
    """A critic or reward model of its own depth and width: values of response tokens, score of the last token."""
    case = Case(folders["scalar"], head="scalar", **(LAYOUTS | UNEVEN)[layout])
    rows = cases.make_rows(8)[0]
    with torch.no_grad():
        model = oracle(folders["scalar"], "scalar")
        values = cases.oracle_outputs(model, rows, "scalar")
        scores = model.score(model.model(rows.tokens_BS).last_hidden_state)[torch.arange(8), rows.lengths_B - 1, 0]
    np.testing.assert_allclose(outputs_of(world, case, "values"), values, **CLOSE)
    np.testing.assert_allclose(outputs_of(world, case, "scores", 2), scores, **CLOSE)


@pytest.mark.parametrize(
    ("kind", "layout", "micro_batches"),
    combinations(
        KINDS,
        LAYOUTS,
        (1, 2),
        briefly=[
            ("tied", "dp2 tp2", 2),
            ("tied", "tp2 pp2", 2),
            ("untied", "dp2 pp2", 2),
            ("scalar", "pp2 on [3, 1]", 1),
        ],
    ),
)
def test_three_steps_equal_a_plain_loop(world, folders, kind, layout, micro_batches):
    """Weights, gradient norm and metrics after three optimizer steps, as if one process had seen all rows at once."""
    head = "scalar" if kind == "scalar" else "lm"
    case = Case(folders[kind], head=head, optimizer=OPTIMIZER, **(LAYOUTS | UNEVEN)[layout])
    settings = cases.Walk("values" if head == "scalar" else "logprobs", 3, micro_batches, temperature=0.8)
    assert_plain_loop(folders[kind], case, settings, world.run(case.ranks, cases.train, case, settings))


@pytest.mark.parametrize(
    ("layout", "rows"),
    combinations(
        ("dp2", "dp2 tp2", "dp2 pp2"),
        ((1, 1, 1), (0, 5, 8), (0, 0, 0)),
        briefly=[("dp2", (0, 0, 0)), ("dp2 tp2", (1, 1, 1)), ("dp2 pp2", (0, 5, 8))],
    ),
)
def test_replicas_with_unequal_rows_equal_a_plain_loop(world, folders, layout, rows):
    """So many of each mini-batch's eight rows on one replica, the rest on the other, in up to three micro-batches."""
    case = Case(folders["tied"], optimizer=OPTIMIZER, **LAYOUTS[layout])
    settings = cases.Walk("logprobs", 3, 3, temperature=0.8)
    found = world.run(case.ranks, cases.train_dealt_unevenly, case, settings, rows)
    assert_plain_loop(folders["tied"], case, settings, found)


@pytest.mark.parametrize("layout", first(1, reversed(LAYOUTS)))
def test_a_sum_of_losses_equals_a_plain_loop(world, folders, layout):
    """Three losses on two row sets, which replicas share unevenly: one step a mini-batch, the very weights."""
    case = Case(folders["untied"], optimizer=OPTIMIZER, **LAYOUTS[layout])
    names = tuple(term.name for term in cases.TERMS)
    found = world.run(case.ranks, cases.train_terms, case, names)
    model = oracle(folders["untied"], "lm")
    norms = cases.plain_steps(model, lambda m: cases.plain_terms(model, names, m), [0, 1, 2], OPTIMIZER)
    assert_trained(model, case, found, norms)
    assert {name for name in found[0][0] if "." in name and "initial" not in name} == {
        "first.loss", "first.mean", "second.loss", "second.entropy", "third.loss", "third.mean",
    }  # fmt: skip


def test_entropy_over_tp_matches_the_whole_vocabulary(world):
    """9 tokens over tp 1, 2 and 4, where the last rank has none of them."""
    for ranks in ((0,), (0, 1), (0, 1, 2, 3)):
        for differences in world.run(ranks, cases.split_entropy, 9, ranks):
            assert max(differences) < 1e-5


@pytest.mark.parametrize(("layout", "output"), [("dp2", "logprobs"), ("dp2 pp2", "logprobs"), ("dp2 tp2", "scores")])
def test_a_replica_without_rows_has_empty_outputs(world, folders, layout, output):
    """The other one's outputs are there; its own have their dimensions, so that they can be kept like any."""
    kind = "scalar" if output == "scores" else "tied"
    case = Case(folders[kind], head="scalar" if output == "scores" else "lm", **LAYOUTS[layout])
    found = world.run(case.ranks, cases.infer_one_row, case, output)
    with_rows, without = (found[i] for i in last_stage(case))
    assert (len(with_rows), len(without)) == (1, 0) and with_rows.ndim == without.ndim
    assert np.isfinite(with_rows).all() and np.abs(with_rows).max() > 0


def assert_plain_loop(folder, case, settings, found):
    """What ranks found is what plain PyTorch finds in one process."""
    head = case.head
    model = oracle(folder, head)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    norms = cases.plain_training(model, head, settings, OPTIMIZER)
    assert not any(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    assert_trained(model, case, found, norms)


def assert_trained(model, case, found, norms):
    """Metrics are equal on all ranks; gradient norms and weights are the plain model's."""
    assert all(metrics == found[0][0] for metrics, _ in found)
    assert found[0][0]["grad_norm"] == pytest.approx(np.mean(norms), rel=1e-4)
    whole = cases.assemble([weights for _, weights in found], {p.name: p.shape for p in parameters(case.spec())})
    for name, parameter in model.named_parameters():
        np.testing.assert_allclose(whole[name], parameter.detach(), rtol=0, atol=3e-5, err_msg=name)


@pytest.mark.parametrize(
    ("kind", "layout"),
    combinations(
        KINDS, LAYOUTS, briefly=[("tied", "tp2 pp2"), ("untied", "dp2 tp2"), ("scalar", "dp2 pp2"), ("tied", "pp2")]
    ),
)
def test_weights_lie_where_the_layout_says(world, folders, kind, layout):
    """Each rank's regions are those of placement, and its views hold the checkpoint's very bits there."""
    case = Case(folders[kind], head="scalar" if kind == "scalar" else "lm", **(LAYOUTS | UNEVEN)[layout])
    expected = megatron_layout(case.spec(), Strategy(case.dp, case.tp, case.pp), case.ranks)
    stored = oracle(folders[kind], case.head).state_dict()
    for rank, shards in zip(case.ranks, world.run(case.ranks, cases.load, case), strict=True):
        assert {name: region for name, (region, _) in shards.items()} == expected.of_rank(rank)
        for name, (region, values) in shards.items():
            np.testing.assert_array_equal(values, stored[name][tuple(slice(*span) for span in region)], err_msg=name)


@pytest.mark.parametrize(
    ("layout", "dtype", "part"),
    combinations(
        ("dp2", "tp2 pp2"),
        ("float32", "bfloat16"),
        ("optimizer", "all"),
        briefly=[("dp2", "float32", "all"), ("tp2 pp2", "bfloat16", "optimizer")],
    ),
)
def test_offloading_changes_nothing(world, folders, layout, dtype, part):
    """Train, offload, reload, train gives the very weights of train, train."""
    case = Case(folders["tied"], dtype=dtype, optimizer=OPTIMIZER, **(LAYOUTS | UNEVEN)[layout])
    twice = cases.Walk("logprobs", mini_batches=3, epochs=2)
    offloaded = world.run(case.ranks, cases.train, case, cases.Walk("logprobs", mini_batches=3), part)
    for (_, expected), (_, found) in zip(world.run(case.ranks, cases.train, case, twice), offloaded, strict=True):
        for name in expected:
            np.testing.assert_array_equal(expected[name][1], found[name][1], err_msg=name)


@pytest.mark.parametrize(
    ("layout", "dtype"),
    combinations(("dp2", "tp2", "pp2"), ("float32", "bfloat16"), briefly=[("pp2", "bfloat16")]),
)
def test_all_of_a_trained_model_leaves_by_parts_and_changes_nothing(world, folders, layout, dtype):
    """Weights, main weights, moments and gradients: the very bytes that a certificate has under them, on every rank."""
    case = Case(folders["tied"], dtype=dtype, optimizer=OPTIMIZER, **LAYOUTS[layout])
    walk, strategy = cases.Walk("logprobs", mini_batches=3), Strategy(case.dp, case.tp, case.pp)
    instance = ModelInstance("actor", "megatron", DeviceMesh(0, 1, 0, 2), strategy)
    by_rank = world.run(case.ranks, cases.train_by_parts, case, walk)
    twice = world.run(case.ranks, cases.train, case, replace(walk, epochs=2))
    for rank, (_, found, left), (_, expected) in zip(case.ranks, by_rank, twice, strict=True):
        for name in expected:
            np.testing.assert_array_equal(expected[name][1], found[name][1], err_msg=name)
        holdings = instance_holdings(instance, (call("a_call", "train_step", "actor", {}),), case.spec(), 128, "cpu")
        there = [kept for kept in holdings if kept.device == instance.devices[case.ranks.index(rank)]]
        for part, (said, gone) in left.items():
            certified = sum(kept.num_bytes for kept in there if kept.moves_with(part))
            assert said == gone and said <= certified <= 1.01 * said, part


@pytest.mark.parametrize(
    ("kind", "layout", "recompute"),
    combinations(
        KINDS, LAYOUTS, (1, "all"), briefly=[("tied", "dp2 tp2", 1), ("untied", "tp2 pp2", "all"), ("scalar", "pp2", 1)]
    ),
)
def test_recomputed_layers_change_nothing(world, folders, kind, layout, recompute):
    """The very metrics and weights of a train_step that keeps all activations."""
    head = "scalar" if kind == "scalar" else "lm"
    case = Case(folders[kind], head=head, optimizer=OPTIMIZER, **(LAYOUTS | UNEVEN)[layout])
    kept = cases.Walk("values" if head == "scalar" else "logprobs", 3, 2)
    again = world.run(case.ranks, cases.train, case, replace(kept, recompute=recompute))
    for expected, found in zip(world.run(case.ranks, cases.train, case, kept), again, strict=True):
        assert expected[0] == found[0]
        for name in expected[1]:
            np.testing.assert_array_equal(expected[1][name][1], found[1][name][1], err_msg=name)


@pytest.mark.parametrize(
    ("kind", "layout", "recompute"),
    combinations(
        KINDS, ("tp2", "dp2 tp2", "tp2 pp2"), (0, "all"), briefly=[("tied", "dp2 tp2", 0), ("untied", "tp2 pp2", "all")]
    ),
)
def test_sequence_parallelism_equals_a_plain_loop(world, folders, kind, layout, recompute):
    """As without it; rows of odd lengths are filled up, so that tp divides the tokens."""
    head = "scalar" if kind == "scalar" else "lm"
    case = Case(folders[kind], head=head, optimizer=OPTIMIZER, **LAYOUTS[layout])
    settings = cases.Walk(
        "values" if head == "scalar" else "logprobs", 3, 2, temperature=0.8, recompute=recompute, tokens_over_tp=True
    )
    assert_plain_loop(folders[kind], case, settings, world.run(case.ranks, cases.train, case, settings))
