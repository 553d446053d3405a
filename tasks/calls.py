"""The four words a flow body is written in: generate, inference, compute and train_step.

Each adds one call to the graph being traced and returns a handle of what the call will produce.

>>> from prefect_rlhf.tasks.calls import generate
>>> generate(None, None)
Traceback (most recent call last):
    ...
prefect_rlhf.placement.errors.GraphError: generate was called outside of the body of an @rlhf_flow function
"""

from __future__ import annotations

from typing import Any, get_args

from prefect_rlhf.engines.engine import Output
from prefect_rlhf.placement.errors import GraphError
from prefect_rlhf.placement.graph import Call, Operation
from prefect_rlhf.placement.model import OptimizerSpec
from prefect_rlhf.tasks.operations import Bound, Operator, operation
from prefect_rlhf.tasks.settings import Optimizer, Sampling, Settings, Update
from prefect_rlhf.tasks.trace import RowsHandle, Trace, current_trace

GENERATED_KEYS = ("tokens", "prompt_length", "logprobs")


def generate(
    model: object,
    prompts: object,
    *,
    sampling: Sampling | None = None,
    batch_size: int | None = None,
    samples_per_prompt: int = 1,
    staleness: int = 0,
    every: int | None = None,
    name: str | None = None,
) -> RowsHandle:
    """Continue prompts: keys `tokens`, `prompt_length` and `logprobs`, those of the policy that made the responses.

    `batch_size` prompts of the dataset enter each step (None: all of them, as an evaluation wants). With `staleness`,
    this and every other call before a train_step uses weights of so many steps earlier than it would; all generates of
    a body agree on it, and evaluation, which has the newest weights, has none.
    """
    trace = current_trace("generate")
    role = trace.role(model, "generate")
    rows = trace.rows(prompts, "generate", batch_size)
    trace.allow(staleness, name or f"{role}_generate", every)
    settings = sampling or Sampling()
    call = Call(
        name=name or f"{role}_generate",
        kind="generate",
        role=role,
        inputs=(rows.port(),),
        outputs=GENERATED_KEYS,
        operation=operation("sample", settings),
        rows_from=rows.dataset,
        num_rows=rows.num_rows * samples_per_prompt,
        every=every,
        samples_per_prompt=samples_per_prompt,
        max_new_tokens=settings.max_new_tokens,
    )
    return trace.add(call)


def inference(
    model: object,
    rows: object,
    *,
    output: Output,
    temperature: float = 1.0,
    batch_size: int | None = None,
    every: int | None = None,
    name: str | None = None,
) -> RowsHandle:
    """Add one forward pass: key `logprobs` or `values` (of each response token) or `scores` (one a row)."""
    trace = current_trace("inference")
    role = trace.role(model, "inference")
    _check_head(trace, role, output, "inference")
    source = trace.rows(rows, "inference", batch_size)
    call = Call(
        name=name or f"{role}_inference",
        kind="inference",
        role=role,
        inputs=(source.port(),),
        outputs=(output,),
        operation=Operation(output),
        rows_from=source.dataset,
        num_rows=source.num_rows,
        every=every,
        rows_per_item=source.rows_per_item,
        temperature=temperature,
    )
    return trace.add(call)


def compute(
    operator: Operator[Any, Any],
    *inputs: RowsHandle,
    settings: Settings,
    every: int | None = None,
    name: str | None = None,
) -> RowsHandle:
    """Add a pure function of rows, on the host CPU of one device; it makes the keys that its @computation names."""
    trace = current_trace("compute")
    _check_operator(trace, operator, "computation")
    handles = [trace.rows(rows, "compute", None) for rows in inputs]
    operator.check_arguments(trace.flow, len(handles))
    if len({handle.num_rows for handle in handles}) != 1:
        raise GraphError(f"flow {trace.flow}: compute {operator.name} needs inputs with the same rows")
    call = Call(
        name=name or operator.name,
        kind="compute",
        role=None,
        inputs=tuple(handle.port() for handle in handles),
        outputs=operator.outputs,
        operation=operator(settings).operation,
        rows_from=handles[0].dataset,
        num_rows=handles[0].num_rows,
        every=every,
        stateful=operator.stateful,
        rows_per_item=handles[0].rows_per_item,
    )
    return trace.add(call)


def train_step(
    model: object,
    *inputs: object,
    loss: Bound,
    optimizer: Optimizer | None = None,
    update: Update | None = None,
    temperature: float = 1.0,
    batch_size: int | None = None,
    name: str | None = None,
) -> None:
    """Train a model on rows, which makes the next version of its weights.

    `temperature` divides the logits, as it did when the rows were sampled.
    """
    trace = current_trace("train_step")
    role = trace.role(model, "train_step")
    if isinstance(loss, Operator):
        raise GraphError(f"flow {trace.flow}: {loss.kind} {loss.name} has no settings; write {loss.name}(algo)")
    if not isinstance(loss, Bound):
        raise GraphError(f"flow {trace.flow}: got {loss!r:.80} as loss, expected a function with @loss, and settings")
    operator = loss.operator
    _check_operator(trace, operator, "loss")
    operator.check_arguments(trace.flow, num_inputs=2)
    _check_head(trace, role, operator.output, "train_step")
    handles = [trace.rows(rows, "train_step", batch_size) for rows in inputs]
    trace.optimizers[role] = OptimizerSpec(**(optimizer or Optimizer()).model_dump())
    update = update or Update()
    trace.add(
        Call(
            name=name or f"{role}_train",
            kind="train_step",
            role=role,
            inputs=tuple(handle.port() for handle in handles),
            outputs=(),
            operation=loss.operation,
            rows_from=handles[0].dataset,
            num_rows=handles[0].num_rows,
            rows_per_item=operator.rows_per_item,
            mini_batches=update.mini_batches,
            epochs=update.epochs,
            temperature=temperature,
        )
    )


def _check_head(trace: Trace, role: str, output: Output, call: str) -> None:
    if output not in get_args(Output):
        raise GraphError(f"flow {trace.flow}: {call} of {role}: got output {output!r}, one of {get_args(Output)}")
    head = "lm" if output == "logprobs" else "scalar"
    if head not in trace.models[role].head:
        raise GraphError(f"flow {trace.flow}: {call} of {role} for {output} needs a model with head: {head}")


def _check_operator(trace: Trace, operator: object, kind: str) -> None:
    if not isinstance(operator, Operator) or operator.kind != kind:
        raise GraphError(f"flow {trace.flow}: got {operator!r:.80}, expected a function decorated with @{kind}")
