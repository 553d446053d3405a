"""Adapters on ranks, and what peft on transformers makes of the same A's and B's."""

from dataclasses import replace
from typing import Any

import megatron_cases as cases
import numpy as np
import torch
from megatron_cases import Case
from torch import Tensor

from prefect_rlhf.engines.files.initial_adapter import initial_values
from prefect_rlhf.engines.megatron.engine import MegatronEngine
from prefect_rlhf.placement.models.adapter import AdapterSpec
from prefect_rlhf.placement.models.weights import parameters, parts

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ADAPTER = AdapterSpec(4, 6.0, ALL)


def values(name: str, shape: tuple[int, ...]) -> Tensor:
    """A parameter of the adapter in tests: A as a run draws it, and B not zero, so that A has a gradient too."""
    return initial_values(name.replace("lora_B", "lora_A"), shape, 0)


def build(rank: int, case: Case) -> MegatronEngine:
    """An engine whose adapter has the values of tests."""
    engine = case.build(rank)
    shapes = {parameter.name: parameter.shape for parameter in parts(case.spec())["adapter"]}
    for name, shard in engine.weights().items():
        if name in shapes:
            shard.view.copy_(values(name, shapes[name])[tuple(slice(*span) for span in shard.region)])
    engine.weights_written()
    return engine


def oracle(model: Any, adapter: AdapterSpec) -> dict[str, torch.nn.Parameter]:
    """Adapt a transformers model by peft; return what is trained under the names of weights."""
    import peft  # ranks import this module too, and need no peft

    options = {"lora_alpha": adapter.alpha, "use_rslora": adapter.rslora, "target_modules": list(adapter.matrices)}
    peft.get_peft_model(model, peft.LoraConfig(r=adapter.rank, **options))  # in place
    found = {}
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            found[name.replace(".default", "")] = parameter
            with torch.no_grad():
                parameter.copy_(values(name.replace(".default", ""), tuple(parameter.shape)))
    if hasattr(model, "score"):
        found["score.weight"] = model.score.weight.requires_grad_()
    assert {parameter for parameter in model.parameters() if parameter.requires_grad} == set(found.values())
    return found


def outputs(rank: int, case: Case) -> np.ndarray | None:
    """Log-probabilities, or values, of this rank's rows."""
    sequences, batch = cases.make_rows(8)
    rows = cases.replica_rows(8, case.dp, 1)[case.replica(rank)]
    output = "values" if case.head == "scalar" else "logprobs"
    found = build(rank, case).infer(cases.part(sequences, batch, rows)[0], output, 1, 1.0)
    return None if found is None else found.numpy()


def train(rank: int, case: Case, settings: cases.Walk) -> tuple[dict[str, float], dict, int, set[str]]:
    """Metrics and weights of one train call, bytes on the device, and the parameters that have a state."""
    engine = build(rank, case)
    rows = cases.replica_rows(24, case.dp, settings.mini_batches)[case.replica(rank)]
    metrics = cases.train_on(engine, *cases.part(*cases.make_rows(24), rows), cases.loss, settings)
    states = {part.parameter for part in engine.state_parts()}
    return metrics, cases.held(engine), engine.device_bytes(), states


def gradients(rank: int, case: Case) -> tuple[dict, float, dict]:
    """Weights before and after a step that tells the gradient, and its norm."""
    engine = build(rank, case)
    before = cases.held(engine)
    output = "values" if case.head == "scalar" else "logprobs"
    rows = cases.replica_rows(8, case.dp, 1)[case.replica(rank)]
    metrics = cases.train_on(engine, *cases.part(*cases.make_rows(8), rows), cases.loss, cases.Walk(output))
    return before, metrics["grad_norm"], cases.held(engine)


def whole(found: list[dict], case: Case) -> dict[str, np.ndarray]:
    """Whole parameters out of the ranks' regions."""
    return cases.assemble(found, {parameter.name: parameter.shape for parameter in parameters(case.spec())})


def without(case: Case) -> Case:
    """The base."""
    return replace(case, adapter=None, optimizer=None)
