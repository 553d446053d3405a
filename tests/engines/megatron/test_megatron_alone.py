"""What one rank can show of the Megatron engine: kernels, memory of logits, bfloat16, main weights, row handling."""

import math
from dataclasses import replace

import megatron_cases as cases
import pytest
import torch
import torch.nn.functional as F
from megatron_cases import OPTIMIZER, VOCAB, Case
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from prefect_rlhf.engines.engine import TrainingRows, TrainSettings
from prefect_rlhf.engines.losses.protocol import LossValues
from prefect_rlhf.engines.megatron import fused
from prefect_rlhf.engines.megatron.cpu import kernels as cpu_kernels
from prefect_rlhf.engines.megatron.groups import build_groups
from prefect_rlhf.engines.megatron.packing import Packing
from prefect_rlhf.engines.megatron.training.batches import micro_batches, mini_batch_rows
from prefect_rlhf.engines.megatron.vocabulary import head
from prefect_rlhf.errors.errors import EngineFailed, InvalidInput, NotFinite
from prefect_rlhf.placement.devices.strategy import Strategy
from tests.support.device import CHOSEN, DEVICE
from tests.support.rounding import KERNEL, MODEL, within

KERNELS = fused if DEVICE == "cuda" else cpu_kernels


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return cases.make_folder(tmp_path_factory.mktemp("models") / "tied")


@pytest.fixture
def alone():
    return build_groups((0,), Strategy(), 0)


def gradients(function, inputs, above):
    output = function(*inputs)
    return [output.detach(), *torch.autograd.grad((output * above).sum(), inputs)]


def assert_same(subject, reference, shapes, above_shape, atol=2e-5):
    """Outputs and gradients of two functions of random inputs agree."""
    torch.manual_seed(0)
    inputs = [torch.randn(shape).to(DEVICE).requires_grad_() for shape in shapes]
    above = torch.randn(above_shape).to(DEVICE)
    for found, expected in zip(gradients(subject, inputs, above), gradients(reference, inputs, above), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=atol)


@pytest.mark.gpu
def test_rms_norm_equals_torch():
    """More rows than one block, gradients of input and weight."""
    assert_same(
        lambda x, w: KERNELS.rms_norm(x, w, 1e-5),
        lambda x, w: F.rms_norm(x, (48,), w, 1e-5),
        [(300, 2, 48), (48,)],
        (300, 2, 48),
        atol=2e-4,  # the weight's gradient is a sum over 600 rows
    )


def test_rms_norm_leaves_its_input_alone():
    """float32 needs no conversion, so a careless in-place step would write into the residual stream."""
    x = torch.randn(4, 8)
    before = x.clone()
    cpu_kernels.rms_norm(x, torch.ones(8), 1e-5)
    assert torch.equal(x, before)


@pytest.mark.gpu
def test_gated_silu_equals_torch():
    """The gate comes first."""
    assert_same(KERNELS.gated_silu, lambda both: F.silu(both[..., :24]) * both[..., 24:], [(300, 2, 48)], (300, 2, 24))


@pytest.mark.gpu
@pytest.mark.skipif(CHOSEN == "pretend", reason="the pretend GPU has no complex numbers")
@pytest.mark.parametrize("longest", [cpu_kernels.LONGEST_EXPLICIT, 1])
def test_attention_equals_rotating_and_masking_by_hand(monkeypatch, longest):
    """Grouped queries, causal, rotated by position; both backward passes."""
    monkeypatch.setattr(cpu_kernels, "LONGEST_EXPLICIT", longest)
    length, rows, groups, queries, dim = 7, 3, 2, 2, 16
    angle = (torch.arange(length)[:, None] * torch.rand(dim // 2)).to(DEVICE)
    cos, sin = angle.cos(), angle.sin()

    def rotate(x):
        turn = torch.polar(torch.ones_like(angle), angle)[:, None, None, None]
        turned = torch.complex(x[..., : dim // 2], x[..., dim // 2 :]) * turn
        return torch.cat((turned.real, turned.imag), dim=-1)

    def reference(qkv):
        query, key, value = rotate(qkv[..., :-2, :]), rotate(qkv[..., -2:-1, :]), qkv[..., -1:, :]
        scores = torch.einsum("sbgqd,tbgkd->bgqst", query, key.expand_as(key)) / math.sqrt(dim)
        seen = torch.ones(length, length, device=DEVICE).tril().bool()
        return torch.einsum("bgqst,tbgkd->sbgqd", scores.masked_fill(~seen, -torch.inf).softmax(-1), value)

    shape = (length, rows, groups, queries + 2, dim)
    assert_same(
        lambda qkv: KERNELS.causal_attention(qkv, cos, sin),
        reference,
        [shape],
        (length, rows, groups, queries, dim),
    )


@pytest.mark.gpu
@pytest.mark.parametrize("at_once", [1, 1 << 20])
def test_token_logprobs_equal_log_softmax(monkeypatch, alone, at_once):
    """Value and gradients, with one slice of the vocabulary or many."""
    monkeypatch.setattr(head, "LOGITS_AT_ONCE_CPU", at_once)
    targets = torch.randint(0, VOCAB, (9,)).to(DEVICE)
    assert_same(
        lambda h, w: head.token_logprobs(h, w, targets, 0.7, alone.tp),
        lambda h, w: (h @ w.t() / 0.7).log_softmax(-1)[torch.arange(9, device=DEVICE), targets],
        [(9, 32), (VOCAB, 32)],
        (9,),
        atol=1e-4,
    )


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements of any tensor that an operator returned."""

    def __init__(self):
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(tensor, torch.Tensor):
                self.num_elements = max(self.num_elements, tensor.numel())
        return made


def test_no_tensor_has_a_logit_for_every_token_and_word(monkeypatch, alone):
    """Forward and backward hold a slice of the vocabulary at a time, and nothing of logits in between."""
    monkeypatch.setattr(head, "LOGITS_AT_ONCE_CPU", 1)  # the narrowest slice: 128 words
    num_tokens, width = 64, 8
    hidden, weight = torch.randn(num_tokens, width, requires_grad=True), torch.randn(VOCAB, width, requires_grad=True)
    saved = []
    keep = torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x)
    with LargestTensor() as largest, keep:
        head.token_logprobs(hidden, weight, torch.zeros(num_tokens).long(), 1.0, alone.tp).sum().backward()
    assert largest.num_elements == num_tokens * 128
    assert max(saved) == VOCAB * width


@pytest.mark.gpu
@pytest.mark.parametrize("micro_batches", [1, 3, 5])
def test_micro_batches_change_no_output(folder, micro_batches):
    """Rows come back in their order, also when their number does not divide."""
    whole = cases.infer(0, Case(folder), "logprobs", 1, 1.0)
    parts = cases.infer(0, Case(folder), "logprobs", micro_batches, 1.0)
    assert parts == within(MODEL, whole)


@pytest.mark.gpu
def test_an_items_rows_stay_together(folder):
    """A chosen and a rejected answer reach the loss side by side, whatever the lengths."""
    seen = []

    def pairs(output, batch):
        seen.extend(batch["pair"].tolist())
        return LossValues(output.sum(1).view(-1, 2).sum(1))

    engine = Case(folder, optimizer=OPTIMIZER).build(0)
    settings = cases.Walk("logprobs", mini_batches=2, micro_batches=3, rows_per_item=2)
    rows, batch = cases.make_rows(24)
    cases.train_on(engine, rows, batch | {"pair": torch.arange(24) // 2}, pairs, settings)
    assert seen[::2] == seen[1::2]
    assert sorted(seen[:12]) == sorted([*range(6)] * 2)


@pytest.mark.gpu
def test_bfloat16_trains_on_float32_main_weights(folder):
    """Steps of 3e-5, each lost in bfloat16, add up as in float32; the compute weights are the main ones, rounded."""
    settings = cases.Walk("logprobs", mini_batches=3, epochs=4)
    optimizer = {"lr": 3e-5, "warmup_steps": 0, "weight_decay": 0.0, "eps": 1e-8, "head_lr": None}
    moved = {}
    for dtype in ("bfloat16", "float32"):
        engine = Case(folder, dtype=dtype).with_optimizer(**optimizer).build(0)
        before = main_weights(engine)
        cases.train_on(engine, *cases.make_rows(24), cases.loss, settings)
        moved[dtype] = float(torch.linalg.vector_norm(main_weights(engine) - before))
        compute = torch.cat([p.detach().flatten() for p in engine._model.parameters()])
        assert torch.equal(main_weights(engine).to(compute.dtype).sort().values, compute.sort().values)
    assert moved["bfloat16"] == pytest.approx(moved["float32"], rel=0.05)


def main_weights(engine):
    """All main weights on end, in the optimizer's order."""
    groups = engine._optimizer._chain.param_groups
    flat = torch.cat([p.detach().flatten() for group in groups for p in group["params"]])
    assert flat.dtype == torch.float32
    return flat.clone()


@pytest.mark.gpu
def test_written_weights_are_trained_on(folder):
    """After a write through `weights()`, the next step starts there and not at the old main weights."""
    case = Case(folder, dtype="bfloat16").with_optimizer(lr=1e-8, weight_decay=0.0)
    engine = case.build(0)
    for shard in engine.weights().values():
        shard.view.mul_(0.5)
    engine.weights_written()
    written = {name: shard.view.clone() for name, shard in engine.weights().items()}
    cases.train_on(engine, *cases.make_rows(24), cases.loss, cases.Walk("logprobs", mini_batches=3))
    for name, shard in engine.weights().items():
        torch.testing.assert_close(shard.view, written[name], rtol=0, atol=1e-6, msg=name)


@pytest.mark.gpu
def test_a_gradient_that_is_not_finite_stops_training(folder):
    """The step is refused in one line, and the weights are what they were."""
    engine = Case(folder, optimizer=OPTIMIZER).build(0)
    before = {name: shard.view.clone() for name, shard in engine.weights().items()}
    rows, batch = cases.make_rows(24)
    batch["advantages"][3, 0] = math.nan
    with pytest.raises(NotFinite, match="the gradient's norm is nan"):
        cases.train_on(engine, rows, batch, cases.loss, cases.Walk("logprobs"))
    assert all(torch.equal(shard.view, before[name]) for name, shard in engine.weights().items())


@pytest.mark.gpu
def test_the_first_mini_batchs_metrics_precede_any_update(folder):
    """So a loss that compares log-probabilities says there how far the two engines are apart."""
    engine = Case(folder, optimizer=OPTIMIZER).build(0)
    rows, batch = cases.make_rows(24)
    before = engine.infer(rows, "logprobs", 1, 1.0).cpu() * batch["mask"]
    found = cases.train_on(engine, rows, batch, cases.loss, cases.Walk("logprobs", mini_batches=2, epochs=2))
    first = before[:12].sum() / batch["mask"][:12].sum()
    assert found["initial_mean"] == within(MODEL, float(first))
    assert found["mean"] != pytest.approx(float(first), abs=1e-2)


@pytest.mark.gpu
def test_rows_without_weight_do_not_update_weights(folder):
    """A mini-batch whose rows are all masked out takes no step, which is counted in place of a loss."""
    engine = Case(folder, optimizer=OPTIMIZER).build(0)
    before = {name: shard.view.clone() for name, shard in engine.weights().items()}
    rows, batch = cases.make_rows(24)
    nothing = {key: column * 0 for key, column in batch.items()}
    found = cases.train_on(engine, rows, nothing, cases.loss, cases.Walk("logprobs"))
    assert set(found) == {"skipped_updates"} and found["skipped_updates"] >= 1
    assert all(torch.equal(shard.view, before[name]) for name, shard in engine.weights().items())


@pytest.mark.gpu
def test_the_padding_token_is_trained_like_any_other(folder):
    """A prompt may contain it. transformers gives its embedding no gradient if config.json names the token."""
    sequences, batch = cases.make_rows(4)
    sequences.tokens_BS[:, 1] = 0
    engine = Case(folder).with_optimizer().build(0)
    found = cases.train_on(engine, sequences, batch, cases.loss, cases.Walk("logprobs"))["grad_norm"]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def norm() -> float:
        """The gradient's norm in transformers, row by row."""
        model.zero_grad()
        rows = zip(sequences.tokens_BS, sequences.prompt_lengths_B, sequences.lengths_B, strict=True)
        for row, (tokens, prompt, length) in enumerate(rows):
            logprobs_SV = model(tokens[None, :length]).logits[0, prompt - 1 : length - 1].log_softmax(-1)
            logprobs_T = logprobs_SV.gather(1, tokens[prompt:length, None])[:, 0]
            advantages_T = batch["advantages"][row, : length - prompt]
            total = cases.loss(logprobs_T, {"advantages": advantages_T}).values.sum()
            (total / batch["mask"].sum()).backward()
        return float(torch.stack([each.grad.norm() for each in model.parameters()]).norm())

    assert norm() != pytest.approx(found, rel=1e-3)
    model.get_input_embeddings().padding_idx = None
    assert norm() == pytest.approx(found, rel=1e-4)


def test_the_gradient_of_a_sum_is_the_sum_of_gradients(folder):
    """Of three losses on two row sets, in several micro-batches; to within some roundings of their norms."""
    case = Case(folder).with_optimizer(lr=1e-9, max_grad_norm=1e9)

    def gradient(*names):
        engine = case.build(0)
        rows = []
        for terms, sequences, batch in cases.rows_of_terms():
            kept = tuple(replace(term, weight=1.0) if len(names) == 1 else term for term in terms if term.name in names)
            rows += [TrainingRows(sequences, kept, (batch,) * len(kept))] if kept else []
        engine.train(rows, TrainSettings(micro_batches=3))
        return torch.cat([parameter.main_grad.flatten() for parameter in engine._model.parameters()])

    parts = [term.weight * gradient(term.name) for term in cases.TERMS]
    whole = gradient(*(term.name for term in cases.TERMS))
    assert float((whole - sum(parts)).norm() / sum(part.norm() for part in parts)) == within(KERNEL, 0.0)


@pytest.mark.gpu
def test_a_frozen_role_holds_weights_alone(folder):
    """No gradient buffers, no optimizer: two bytes for each bfloat16 parameter."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    engine = Case(folder, dtype="bfloat16").build(0)
    assert engine.device_bytes() == 2 * sum(p.numel() for p in model.parameters())


@pytest.mark.gpu
def test_offloading_frees_every_byte_once(folder):
    """All bytes leave and come back, all but gradients as copies; a second call does nothing."""
    engine = Case(folder, optimizer=OPTIMIZER).build(0)
    cases.train_on(engine, *cases.make_rows(24), cases.loss, cases.Walk("logprobs"))
    held = engine.device_bytes()
    assert held > 16 * sum(shard.view.numel() for shard in engine.weights().values())  # weight, gradient, two moments
    gradients = 4 * sum(shard.view.numel() for shard in engine.weights().values())
    copied = engine.offload()
    assert copied == pytest.approx(held - gradients, rel=0.01)  # padding
    assert (engine.device_bytes(), engine.offload()) == (0, 0)
    assert (engine.reload(), engine.device_bytes(), engine.reload()) == (copied, held, 0)


@pytest.mark.gpu
def test_training_outdates_the_copy_on_the_host(folder):
    """Unchanged tensors may be dropped after a reload; after a train_step they have to be copied."""
    engine, rows = Case(folder, optimizer=OPTIMIZER).build(0), cases.make_rows(24)
    cases.train_on(engine, *rows, cases.loss, cases.Walk("logprobs"))
    engine.offload()
    engine.reload()
    state = [part.values.clone() for part in engine.state_parts()]
    assert engine.offload(copies=False) == 0 and engine.reload() > 0
    assert all(torch.equal(part.values, old) for part, old in zip(engine.state_parts(), state, strict=True))
    cases.train_on(engine, *rows, cases.loss, cases.Walk("logprobs"))
    engine.offload(copies=False)
    with pytest.raises(EngineFailed, match="found no copy in host memory"):
        engine.reload()


@pytest.mark.gpu
def test_a_new_head_starts_at_zero(folder):
    """A scalar role on a language model's checkpoint: every value is 0 before training, and moves."""
    engine = Case(folder, head="scalar", new_head=True, optimizer=OPTIMIZER).build(0)
    rows, batch = cases.make_rows(24)
    assert not engine.infer(rows, "values", 1, 1.0).any()
    cases.train_on(engine, rows, batch, cases.loss, cases.Walk("values", mini_batches=3))
    assert engine.infer(rows, "values", 1, 1.0).any()


def test_mini_batches_are_of_the_sizes_told_or_else_equal():
    assert [rows.tolist() for rows in mini_batch_rows(5, 2, (3, 2))] == [[0, 1, 2], [3, 4]]
    with pytest.raises(InvalidInput, match="mini_batches: got 3, expected a divisor of the 8 rows"):
        mini_batch_rows(8, 3)


@pytest.mark.parametrize("equal_shapes", [False, True])
@pytest.mark.parametrize(("count", "rows_per_item"), [(1, 1), (3, 1), (4, 2), (50, 1)])
def test_micro_batches_have_about_as_many_tokens_each(count, rows_per_item, equal_shapes):
    """Every row once, items whole; no group has more than an equal part and one item; filler makes shapes equal."""
    sequences, _ = cases.make_rows(24)
    found = micro_batches(sequences, torch.arange(24), count, rows_per_item, equal_shapes)
    assert sorted(row for micro in found for row in micro.rows.tolist()) == list(range(24))
    assert all(len({row // rows_per_item for row in m.rows.tolist()}) * rows_per_item == len(m.rows) for m in found)
    tokens = [int(micro.sequences.lengths_B.sum()) for micro in found]
    longest_item = int(sequences.lengths_B.view(-1, rows_per_item).sum(1).max())
    assert max(tokens) <= sum(tokens) / count + longest_item
    shapes = [micro.input_ids.shape[1] for micro in found]
    assert shapes == ([max(tokens)] * len(found) if equal_shapes else tokens)


def test_filler_affects_neither_values_nor_gradients():
    """Packed and spread with filler, values and gradients are those without; filler's own gradient is 0."""
    lengths, wide = torch.tensor([2, 4, 1]), torch.randn(4, 3, 5)
    plain, filled = Packing.of(lengths, 4), Packing.of(lengths, 4, num_tokens=10)
    packed = filled.pack(wide)
    assert torch.equal(packed[:7], plain.pack(wide)) and packed.shape == (10, 5)
    packed.requires_grad_(True)
    above = torch.randn(4, 3, 5)
    (gradient,) = torch.autograd.grad((filled.spread(packed) * above).sum(), packed)
    assert torch.equal(gradient[:7], plain.pack(above))
    assert not gradient[7:].any()
    wide.requires_grad_(True)
    weights = torch.randn(10, 5)
    (gradient,) = torch.autograd.grad((filled.pack(wide) * weights).sum(), wide)
    (expected,) = torch.autograd.grad((plain.pack(wide) * weights[:7]).sum(), wide)
    assert torch.equal(gradient, expected)
