"""Checks of a model's parts: every call has the head that it needs, every head is used, every adapter is trained."""

from dataclasses import replace

from prefect_rlhf.errors.errors import GraphError, InvalidInput
from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.placement.models.model import ModelSpec
from prefect_rlhf.placement.models.outputs import OUTPUTS, head_of


def check_output(flow: str, model: ModelSpec, output: str, call: str) -> None:
    """Raise GraphError unless the model has the head for an output; `call` is the name of the body's function."""
    if output not in (*OUTPUTS,):
        raise GraphError(f"flow {flow}: {call} of {model.role}: got output {output!r}, expected one of {(*OUTPUTS,)}")
    head = head_of(output)
    if head not in model.head:
        needed = f"a model with head: {head} (or lm+scalar, which has both)"
        raise GraphError(f"flow {flow}: {call} of {model.role} for {output} needs {needed}, not {model.head}")


def check_no_idle_head(graph: DataflowGraph) -> DataflowGraph:
    """Return the graph. Raises GraphError if no call uses one of the two heads of a model."""
    for model in graph.models:
        asked = {head for call in graph if call.role == model.role for head in _heads(graph, call.name)}
        if model.head == "lm+scalar" and len(asked) == 1:
            only = asked.pop()
            raise GraphError(f"flow {graph.name}: {model.role}.head is {model.head}, but calls use only {only}")
    return graph


def check_new_heads(graph: DataflowGraph) -> DataflowGraph:
    """Return the graph. Raises InvalidInput for a new scalar head that scores rows but that no loss trains."""
    for model in graph.models:
        trainer = graph.trained_by(model.role)
        trained = _heads(graph, trainer.name) if trainer else set()
        if model.new_head and "scalar" in model.head and "scalar" not in trained and not model.follows:
            expected = f"false: no train_step trains the head of {model.role}, so every row would score its initial 0"
            raise InvalidInput(f"{model.role}.new_head", True, expected)
    return graph


def check_adapters(graph: DataflowGraph) -> DataflowGraph:
    """Return the graph. Raises InvalidInput for a new adapter that no call trains: the model would equal its base."""
    for model in graph.models:
        is_written = graph.trained_by(model.role) is not None or model.follows is not None
        if model.adapter is not None and not model.adapter.path and not is_written:
            expected = f"no adapter, or adapter.path: no train_step trains {model.role}, so a new one would stay zero"
            raise InvalidInput(f"{model.role}.adapter", f"rank {model.adapter.rank}", expected)
    return graph


def with_bases_formats(graph: DataflowGraph) -> DataflowGraph:
    """Return the graph, giving a frozen model four bits if it is the base of a model with a four-bit base.

    So an actor's reference can be the actor's base, held in memory once. Raises InvalidInput if a role states another
    format for the same base.
    """
    stated = {(model.content, model.dtype): model for model in graph.models if model.base_dtype and model.content}
    models = []
    for model in graph.models:
        other = stated.get((model.content, model.dtype))
        if other is None or model.base_dtype is not None:
            models.append(model)
        elif model.adapter is not None and model.follows is None:
            right = f"{other.base_dtype}, as for {other.role}, which has the same base"
            raise InvalidInput(f"{model.role}.base_dtype", model.base_dtype, right)
        else:
            is_frozen = graph.trained_by(model.role) is None and model.follows is None
            has_base = is_frozen or model.adapter is not None
            models.append(replace(model, base_dtype=other.base_dtype) if has_base else model)
    return replace(graph, models=tuple(models)) if stated else graph


def adapter_remarks(graph: DataflowGraph) -> tuple[str, ...]:
    """Return a log line for each trained adapter, about the learning rates that are common for adapters."""
    trained = (model for model in graph.models if model.adapter is not None and graph.trained_by(model.role))
    return tuple(
        f"{model.role} trains an adapter at a learning rate of {model.optimizer.lr:g}; about ten times the rate of "
        "full training is common for adapters (Schulman et al. 2025, LoRA Without Regret)"
        for model in trained
        if model.optimizer is not None
    )


def _heads(graph: DataflowGraph, name: str) -> set[str]:
    call = graph.call(name)
    if call.kind == "generate":
        return {"lm"}
    if call.kind == "train_step":
        return {head_of(output) for term in call.terms for output in term.outputs}
    return {head_of(output) for output in call.outputs}
