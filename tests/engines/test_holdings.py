"""What an instance is said to keep on its device, against the storage bytes that the real engines report."""

from dataclasses import replace

import megatron_cases
import pytest
import vllm_cases
from megatron_cases import OPTIMIZER, Case
from processors import bytes_with_packed

from prefect_rlhf.engines.engine import SamplingSettings
from prefect_rlhf.engines.vllm.engine import VllmEngine
from prefect_rlhf.placement.devices.mesh import DeviceMesh
from tests.support.by_device import instance_holdings
from tests.support.strategies import call

TOLERANCE = 1.001


def predicted(spec, instance, kind: str, rows: int = 8, max_length: int = 128) -> int:
    made = call("a_call", kind, spec.role, {}, num_rows=rows)
    return sum(holding.num_bytes for holding in instance_holdings(instance, (made,), spec, max_length, "cpu"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("tied", "head"), [(True, "lm"), (False, "lm"), (True, "scalar"), (True, "lm+scalar"), (False, "lm+scalar")]
)
@pytest.mark.parametrize("trained", [False, True])
def test_a_megatron_instance_keeps_the_predicted_bytes(tmp_path, dtype, tied, head, trained):
    """After a step, since Adam makes its moments in the first. An odd vocabulary makes padding count."""
    scalar, vocab = head == "scalar", megatron_cases.VOCAB + 1
    folder = megatron_cases.make_folder(tmp_path, tied=tied, scalar=scalar, vocab=vocab, layers=2)
    case = Case(folder, head=head, dtype=dtype, optimizer=OPTIMIZER if trained else None, new_head=True)
    engine = case.build(0)
    if trained:
        megatron_cases.train_on(
            engine,
            *megatron_cases.make_rows(4),
            megatron_cases.loss,
            megatron_cases.Walk("values" if scalar else "logprobs"),
        )
    found = predicted(case.spec(), engine.instance, "train_step" if trained else "inference")
    assert engine.device_bytes() <= found <= TOLERANCE * engine.device_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_a_vllm_instance_keeps_the_predicted_bytes(tmp_path, tied):
    """After a generate, since packed copies are made when they are first used."""
    command = vllm_cases.build_command(vllm_cases.make_folder(tmp_path, 1, tied=tied), tied=tied, dtype="bfloat16")
    engine = VllmEngine(command, 0)
    engine.generate(vllm_cases.make_prompts(4), SamplingSettings(2), range(4))
    instance = replace(command.instance, mesh=DeviceMesh(0, 1, 0, 1))
    found = predicted(command.model, instance, "generate", command.max_rows, command.max_sequence_length)
    assert bytes_with_packed(engine) <= found <= TOLERANCE * bytes_with_packed(engine)
