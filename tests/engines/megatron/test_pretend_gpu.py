"""The code for CUDA on a pretend GPU: the numbers of the CPU, no operation on two devices, few waits of the host.

`make test` runs a family with every feature. The other families run in `make test-all`.
"""

import family_cases
import megatron_cases as cases
import pytest
import torch
from megatron_cases import OPTIMIZER, Case, Walk

from prefect_rlhf.engines.engine import SamplingSettings, Shard
from prefect_rlhf.engines.weights.fingerprint import Factors, Sample, digest
from tests.support.pretend_gpu import DEVICE, GpuTensor, pretend_gpu
from tests.support.rounding import KERNEL, within
from tests.tasks.rl.every_loss import every_loss, units_of
from tests.tasks.rl.loss_sums import loss_sums

PROMPTS, SEEDS = [[1, 2, 3], [4, 5], [6]], [1, 2, 3]
TOKENS = 8
GREEDY = SamplingSettings(TOKENS, temperature=0.0)
FILTERED = SamplingSettings(TOKENS, 0.9, top_p=0.9, top_k=20, min_p=0.01, stop_at_eos=False)
PLAIN = SamplingSettings(TOKENS, 0.9, stop_at_eos=False)
EVERYTHING = "gemma3_text"  # windows, norms of queries and keys, norms after a layer, a scaled and tied embedding


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return cases.make_folder(tmp_path_factory.mktemp("models") / "llama", layers=2, hidden=64)


def close(found: torch.Tensor, expected: torch.Tensor, atol: float) -> bool:
    return torch.allclose(found.detach().cpu().float(), expected.float(), atol=atol)


def compare(case: Case, logprobs: float, metrics: float) -> None:
    """Every call of an engine on the pretend GPU and of an engine of the CPU; `logprobs`, `metrics` are tolerances."""
    sequences, batch = cases.make_rows(8)
    exact = case.dtype == "float32"  # in bfloat16, another token may be likeliest
    walk = Walk("logprobs", mini_batches=2, micro_batches=2)

    def results(engine):
        yield digest(engine.weights()), Sample(engine.weights(), "key")._sums.tolist()
        yield [engine.infer(sequences, output, 2, 0.7) for output in ("logprobs", "entropy")]
        yield [engine.generate(PROMPTS, sampling, SEEDS) for sampling in (GREEDY, FILTERED)] if exact else []
        yield cases.train_on(engine, sequences, batch, cases.loss, walk)
        yield {name: shard.view for name, shard in engine.weights().items()}

    fingerprints, outputs, generated, trained, weights = results(case.build(0))
    with pretend_gpu():
        engine = case.build(0)
        assert engine._device == DEVICE and type(engine._wrapped).__name__ == "DistributedDataParallel"
        of_engine = results(engine)
        assert next(of_engine) == fingerprints
        for found, expected in zip(next(of_engine), outputs, strict=True):
            assert isinstance(found, GpuTensor) and close(found, expected, logprobs)
        for found, expected in zip(next(of_engine), generated, strict=True):
            assert found.tokens == expected.tokens
            assert found.kept_mass == pytest.approx(expected.kept_mass, abs=1e-5)
        assert next(of_engine) == pytest.approx(trained, abs=metrics, rel=metrics)
        for name, view in next(of_engine).items():
            assert isinstance(view, GpuTensor) and close(view, weights[name], 1e-4 if exact else 3e-2), name


def test_results_differ_from_the_cpu_by_some_roundings_and_are_the_same_again():
    """Otherwise a tolerance that no GPU meets would pass here."""
    logits = torch.randn(50, 300, generator=torch.Generator().manual_seed(1)) * 3
    expected = logits.log_softmax(-1)
    with pretend_gpu():
        first, second = (logits.to("cuda").softmax(-1).log().cpu() for _ in range(2))
    assert torch.equal(first, second)
    apart = float((first - expected).abs().max())
    assert 2e-6 < apart == within(KERNEL, 0.0)


def test_a_family_has_the_numbers_of_the_cpu(tmp_path):
    folder = family_cases.make_family(tmp_path, EVERYTHING, 2)
    compare(Case(folder, optimizer=OPTIMIZER), 1e-4, 1e-4)


@pytest.mark.all
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", family_cases.OPTIONS)
def test_so_do_the_others(tmp_path, name, dtype):
    """Log-probabilities of -16 are 0.06 apart in bfloat16, and processors without AMX differ by five such steps."""
    logprobs, metrics = (1e-4, 1e-4) if dtype == "float32" else (0.4, 0.1)
    compare(Case(family_cases.make_family(tmp_path, name, 2), dtype=dtype, optimizer=OPTIMIZER), logprobs, metrics)


def test_scores_and_values_are_those_of_the_cpu(tmp_path):
    """A scalar head keeps its own learning rate, and is trained by pairs."""
    case = Case(cases.make_folder(tmp_path, scalar=True, layers=2, hidden=64), head="scalar", optimizer=OPTIMIZER)
    sequences, batch = cases.make_rows(8)
    walk = Walk("values", mini_batches=2, micro_batches=2)

    def results(engine):
        outputs = [engine.infer(sequences, output, 2, 1.0) for output in ("scores", "values")]
        return outputs, cases.train_on(engine, sequences, batch, cases.loss, walk)

    outputs, trained = results(case.build(0))
    with pretend_gpu():
        found, metrics = results(case.build(0))
        assert all(close(ours, theirs, 1e-4) for ours, theirs in zip(found, outputs, strict=True))
        assert metrics == pytest.approx(trained, rel=1e-4, abs=1e-4)


def test_an_inference_waits_little(folder):
    """At most 10 waits per micro-batch. In fact it waits once for its rows and once for their packing."""
    sequences, _ = cases.make_rows(16)
    with pretend_gpu() as gpu:
        engine = Case(folder).build(0)
        engine.infer(sequences, "logprobs", 4, 0.7)  # makes the tables of the rotary embedding
        for output in ("logprobs", "entropy"):
            with gpu.waits.counted() as waits:
                engine.infer(sequences, output, 4, 0.7)
            assert waits.total() <= 2 * 4, waits


def test_a_training_step_waits_little(folder):
    """At most 5 waits per micro-batch, with those of the optimizer step. Other waits do not grow with the model."""
    sequences, batch = cases.make_rows(16)
    with pretend_gpu() as gpu:
        engine = Case(folder, optimizer=OPTIMIZER).build(0)
        cases.train_on(engine, sequences, batch, cases.loss, Walk("logprobs", 2, 4))
        with gpu.waits.counted() as waits:
            cases.train_on(engine, sequences, batch, cases.loss, Walk("logprobs", 2, 4))
        assert waits.total() <= 5 * 8, waits
        with gpu.waits.counted() as once:
            cases.train_on(engine, sequences, batch, cases.loss, Walk("logprobs", 1, 1))
        assert once.total() <= 10, once


@pytest.mark.parametrize(("sampling", "a_token"), [(GREEDY, 1), (PLAIN, 1), (FILTERED, 3)])
def test_a_decoded_token_is_one_wait(folder, sampling, a_token):
    """Waits of a call grow by 1 per token of the longest response, or by at most 3 with filters."""
    with pretend_gpu() as gpu:
        engine = Case(folder).build(0)
        counts = []
        for num_tokens in (4, 12):
            settings = SamplingSettings(
                num_tokens, sampling.temperature, sampling.top_p, False, sampling.top_k, sampling.min_p
            )
            with gpu.waits.counted() as waits:
                engine.generate(PROMPTS, settings, SEEDS)
            counts.append(waits.total())
        assert counts[1] - counts[0] <= a_token * 8, waits


def test_fingerprints_wait_once(folder):
    """However many parameters they have; the factors are on the device by then."""
    with pretend_gpu() as gpu:
        engine, table = Case(folder).build(0), Factors()
        digest(engine.weights(), table)
        before = Sample(engine.weights(), "key", table)
        for take in (lambda: digest(engine.weights(), table), lambda: before.changed(engine.weights())):
            with gpu.waits.counted() as waits:
                take()
            assert waits.total() == 1, waits


def test_parts_of_a_fused_weight_are_summed_together():
    """Queries of many key-value heads cost as many launches as those of a few, and have the CPU's fingerprint."""
    counts = []
    for heads in (2, 8):
        plain = torch.randn(heads, 6, 16).to(torch.bfloat16)[:, :4]
        region = ((0, 4 * heads), (0, 16))
        with pretend_gpu() as gpu:
            on_gpu = torch.empty(heads, 6, 16, dtype=torch.bfloat16, device="cuda")[:, :4]
            on_gpu.copy_(plain)
            table = Factors()
            digest({"q": Shard(region, on_gpu)}, table)
            with gpu.operations.counted() as operations:
                found = digest({"q": Shard(region, on_gpu)}, table)
        assert found == digest({"q": Shard(region, plain)})
        counts.append(operations.total())
    assert counts[0] == counts[1]


def test_an_offload_keeps_the_bits_and_the_cache_of_the_allocator(folder):
    """Emptying the cache would stop the device under the calls that run meanwhile (N14)."""
    with pretend_gpu() as gpu:
        engine = Case(folder, optimizer=OPTIMIZER).build(0)
        before = digest(engine.weights())
        assert engine.offload() > 0
        with pytest.raises(RuntimeError, match="storage is emptied"):
            digest(engine.weights())
        engine.reload()
        assert digest(engine.weights()) == before
        assert gpu.emptied_caches == 0


def test_pipelines_do_not_synchronize_the_device_for_messages(folder):
    assert Case(folder).build(0)._model.config.batch_p2p_sync is False


def test_the_norm_is_that_of_megatron(folder):
    """Bit for bit on CPU, where runs of earlier versions must be repeated."""
    engine = Case(folder, optimizer=OPTIMIZER).build(0)
    optimizer, found = engine._optimizer, []
    norm = optimizer._norm
    optimizer._norm = lambda: found.append((norm(), float(optimizer._chain.get_grad_norm()))) or found[-1][0]
    cases.train_on(engine, *cases.make_rows(8), cases.loss, Walk("logprobs", mini_batches=2))
    assert len(found) == 2 and all(ours == theirs > 0 for ours, theirs in found)


@pytest.mark.parametrize(("operator", "algo", "output", "batch"), list(every_loss()))
def test_losses_stay_on_the_device(operator, algo, output, batch):
    """The values and gradients of the CPU, on columns of the device, without a wait."""
    output = output.clone().requires_grad_()
    on = units_of(operator)
    expected = loss_sums(operator, output, batch, algo, **on)
    expected.total.backward()
    with pretend_gpu() as gpu:
        on_gpu = {key: column.to("cuda") for key, column in batch.items()}
        ours = output.detach().to("cuda").requires_grad_()
        with gpu.waits.counted() as waits:
            found = loss_sums(operator, ours, on_gpu, algo, **on)
            found.total.backward()
        assert waits.total() == 0, waits
        assert isinstance(ours.grad, GpuTensor) and close(ours.grad, output.grad, 1e-12)
        assert float(found.total) == pytest.approx(float(expected.total))


def test_tensors_of_two_devices_do_not_mix():
    """The pretend GPU refuses what CUDA refuses, also in a backward pass."""
    with pretend_gpu():
        ours, host = torch.ones(2, device="cuda", requires_grad=True), torch.ones(2)
        for operation in (
            lambda: ours + host,
            lambda: torch.cat((ours, host)),
            lambda: host[torch.ones(1, device="cuda").long()],
        ):
            with pytest.raises(RuntimeError):
                operation()
        assert float((ours * torch.tensor(3.0)).sum()) == 6  # a number on the host is fine
        made = (ours * 2).sum()
        ours.register_hook(lambda gradient: gradient + host)
        with pytest.raises(RuntimeError, match="expected all tensors on cuda:0"):
            made.backward()
