"""A new output takes the steps of CONTRIBUTING.md alone: an inference, a loss and ranks then have it."""

from dataclasses import replace
from pathlib import Path

import megatron_cases as cases
import pytest
import torch
from megatron_cases import OPTIMIZER, Case, Walk
from transformers import AutoModelForCausalLM

from prefect_rlhf.engines.commands import BuildCommand, CallCommand
from prefect_rlhf.engines.engine import SamplingSettings
from prefect_rlhf.engines.files.huggingface import read_model_spec
from prefect_rlhf.engines.gang.local import LocalGang
from prefect_rlhf.engines.gang.open import FORK_ENVIRONMENT, RANK_ENVIRONMENT
from prefect_rlhf.engines.gang.processes.messages import GangSettings
from prefect_rlhf.engines.losses.protocol import LossValues
from prefect_rlhf.placement.devices.mesh import DeviceMesh
from prefect_rlhf.placement.devices.strategy import Strategy
from prefect_rlhf.placement.layout.layout import layout_of
from prefect_rlhf.placement.plan import ModelInstance
from tests.engines.likeliest import NAME, WIDTH, registered
from tests.engines.test_new_engine import PROMPTS, OpenRank, Prompts, call
from tests.support.strategies import ROLLOUT
from tests.support.tiny import make_model
from tests.tasks.small_tokenizer import alone

INSTANCE = ModelInstance("actor", "megatron", DeviceMesh(0, 1, 0, 2), Strategy(tp=2))


@pytest.fixture(scope="module", autouse=True)
def in_the_table():
    with registered():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return cases.make_folder(tmp_path_factory.mktemp("models") / "tied", layers=2)


def expected(folder, sequences, temperature):
    """[B, T, WIDTH] by transformers."""
    model, mask = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), sequences.response_mask_BT()
    found = torch.zeros(*mask.shape, WIDTH)
    for row, (prompt, end) in enumerate(
        zip(sequences.prompt_lengths_B.tolist(), sequences.lengths_B.tolist(), strict=True)
    ):
        logits = model(sequences.tokens_BS[row : row + 1, :end]).logits[0, prompt - 1 : end - 1] / temperature
        found[row, : end - prompt] = logits.log_softmax(-1).topk(WIDTH).values
    return found


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_inferred_vectors_match_transformers(folder, micro_batches):
    with torch.no_grad():
        whole = expected(folder, cases.make_rows(8)[0], 0.7)
    found = torch.from_numpy(cases.infer(0, Case(folder), NAME, micro_batches, 0.7))
    torch.testing.assert_close(found, whole, rtol=0, atol=2e-4)


def spread(likeliest_BTK, batch):
    """The distance of the likeliest token from the last of the likeliest."""
    return LossValues(likeliest_BTK[..., 0] - likeliest_BTK[..., -1])


def test_a_loss_on_the_output_is_trained(folder):
    """The first loss is that of transformers, and the second is lower."""
    sequences, batch = cases.make_rows(8)
    with torch.no_grad():
        values = spread(expected(folder, sequences, 1.0), batch).values
    engine = Case(folder, optimizer=replace(OPTIMIZER, warmup_steps=0, lr=1e-4)).build(0)
    first, second = (cases.train_on(engine, sequences, batch, spread, Walk(NAME))["loss"] for _ in range(2))
    assert first == pytest.approx(float(values.sum() / batch["mask"].sum()), abs=2e-4)
    assert second < first


@pytest.mark.slow
@pytest.mark.all  # test_new_engine.py starts ranks with a registered engine
def test_ranks_that_start_later_have_it_and_keep_its_vectors(tmp_path):
    """On two ranks that divide the vocabulary: the rows of a rank hold a vector for each response token."""
    folder = make_model(tmp_path / "llama", heads=4, kv_heads=2)
    environment = {**RANK_ENVIRONMENT, **FORK_ENVIRONMENT}
    settings = GangSettings(2, OpenRank, environment=environment, preload=("torch.distributed",))
    gang = LocalGang(settings)

    def on_all(method, *arguments):
        return gang.call(method, dict.fromkeys((0, 1), arguments), doing=method.__name__, deadline_seconds=120)

    def run(of, **fields):
        rows = tuple(range(len(PROMPTS)))
        common = {"seed": 3, "run_dir": Path(), "tokenizers": alone(folder), "reads": 0}
        on_all(OpenRank.run_call, CallCommand(0, of, INSTANCE, rows, rows, **common, **fields))

    try:
        spec = read_model_spec("actor", folder, "lm", dtype="float32")
        on_all(OpenRank.open_dataset, Prompts())
        layout = layout_of(INSTANCE, spec, INSTANCE.mesh)
        on_all(OpenRank.build, BuildCommand(spec, INSTANCE, (0, 1), layout, 64, 5))
        greedy = SamplingSettings(8, temperature=0.0, stop_at_eos=False)
        run(call("generate", "prompts", ("prompt_tokens",), ROLLOUT), sampling=greedy)
        run(call("inference", "generate", ROLLOUT[:2], (NAME,)), output=NAME)
        rows = range(len(PROMPTS))
        vectors, tokens = (
            gang.call(OpenRank.rows, {0: (*column, rows)}, doing="look", deadline_seconds=30)[0]
            for column in (("inference", NAME), ("generate", "tokens"))
        )
    finally:
        gang.close()
    oracle = AutoModelForCausalLM.from_pretrained(folder)
    for prompt, row, found in zip(PROMPTS, tokens, vectors, strict=True):
        with torch.no_grad():
            logits = oracle(torch.tensor([row])).logits[0, len(prompt) - 1 : -1]
        torch.testing.assert_close(torch.tensor(found), logits.log_softmax(-1).topk(WIDTH).values, atol=1e-4, rtol=1e-4)
