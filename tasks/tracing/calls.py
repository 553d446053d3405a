"""The functions of a flow body, except select: generate, inference, score, compute, train_step and follow.

Each but the last adds a call to the traced graph and returns a handle of the call's result.

>>> from prefect_rlhf.tasks.tracing.calls import generate
>>> generate(None, None)
Traceback (most recent call last):
    ...
prefect_rlhf.errors.errors.GraphError: generate was called outside of the body of an @rlhf_flow function
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from prefect_rlhf.errors.errors import GraphError, InvalidInput
from prefect_rlhf.placement.graph import Call, Operation, Term
from prefect_rlhf.placement.models.model import FollowSpec, OptimizerSpec
from prefect_rlhf.placement.row_set import RowLimit, RowSet
from prefect_rlhf.tasks.host_rewards import HostRewards
from prefect_rlhf.tasks.play import Play
from prefect_rlhf.tasks.settings import GREEDY, Optimizer, Sampling, Settings, Update
from prefect_rlhf.tasks.tracing.arguments import (
    check_kind,
    check_number,
    check_temperature,
    check_whole,
    naming_arguments,
)
from prefect_rlhf.tasks.tracing.heads import check_output
from prefect_rlhf.tasks.tracing.operations import ROW_KEYS, Bound, Operator, operation
from prefect_rlhf.tasks.tracing.terms import LossOn, Terms
from prefect_rlhf.tasks.tracing.trace import RowsHandle, Trace, check_not_chosen, current_trace, origin_of

TOKEN_KEYS = ("tokens", "prompt_length")
GENERATED_KEYS = (*TOKEN_KEYS, "logprobs", "truncated")
PLAYED_KEYS = (*GENERATED_KEYS, "mask", "turn", "turn_rewards", "scores")
GROUP_KEYS = ("group_tokens", "group_rows")


@naming_arguments
def generate(
    model: object,
    prompts: object,
    *,
    sampling: Sampling | None = None,
    batch_size: int | None = None,
    samples: int = 1,
    staleness: int = 0,
    every: int | None = None,
    draws: str | None = None,
    play: Play | None = None,
    name: str | None = None,
) -> RowsHandle:
    """Generate `samples` responses to each prompt; the result has a row for each response.

    Its keys are `tokens`, `prompt_length`, `logprobs` (under the policy that generated the tokens) and `truncated` [B],
    which is 1 for a response that was cut at `max_new_tokens`, before an end token or a stop string.
    Each step takes `batch_size` prompts from the dataset (None takes all, as an evaluation needs). Instead of a
    dataset, you can pass rows with `prompt_tokens` that a computation made.

    With `play`, a Play parameter, each row is a conversation between the model and your coroutine. That adds `mask` [B,
    T] (1 at tokens that the model wrote), `turn` [B, T] (counted from 0), `turn_rewards` [B, K] and `scores` [B] (their
    sum; NaN if the play failed). `truncated` is then 1 if the row ran out of tokens or turns.

    With `staleness`, this call and every other call before a train_step use weights that are this many steps old. All
    generate calls in a body need the same staleness, except evaluations, which always use the newest weights.

    A call's random numbers depend on its name. To share them between calls, pass the same `draws`, or pass the other
    call's name as `draws`: equal prompts with equal probabilities then get equal responses.
    """
    trace = current_trace("generate")
    role = trace.role(model, "generate")
    check_output(trace.flow, trace.models[role], "logprobs", "generate")
    name = name or f"{role}_generate"
    where = f"flow {trace.flow}: generate {name}"
    check_kind(where, "sampling", sampling, Sampling, "temperature=1.0")
    check_kind(where, "play", play, Play)
    check_whole(where, "samples", samples, "responses to each prompt", 1)
    check_whole(where, "staleness", staleness, "steps", 0)
    source = trace.rows(prompts, "generate", batch_size, every)
    trace.require(("prompt_tokens",), (source,), f"generate {name}")
    trace.allow(staleness, name, every)
    check_not_chosen(trace, source.rows, f"generate {name}")
    settings = sampling or Sampling()
    if draws is not None and (not isinstance(draws, str) or not draws):
        expected = "a name of random numbers, such as the name of another generate"
        raise GraphError(f"{where} has draws {draws!r:.40}; expected {expected}")
    parameter = trace.parameter_of(settings)
    if samples > 1:
        check_sampled(parameter or f"{name}.sampling", settings, samples)
    rows = RowSet(name, source.rows.dataset, samples, source.rows)
    bounds = None
    if play is not None:
        play = play.absolute()
        play.settings  # noqa: B018  checks the function's name
        if play.answers_messages and not settings.stop_at_eos:
            right = f"true: with signature {play.signature} an answer follows the end of the model's turn"
            raise InvalidInput(f"{parameter or 'sampling'}.stop_at_eos", False, right)
        bounds = play.bounds
    call = Call(
        name=name,
        kind="generate",
        role=role,
        inputs=(replace(source, keys=("prompt_tokens",)).port(rows),),
        outputs=GENERATED_KEYS if play is None else PLAYED_KEYS,
        operation=operation("sample", settings, parameter=parameter),
        rows=rows,
        num_rows=source.num_rows * samples,
        every=every,
        max_new_tokens=settings.max_new_tokens if play is None else play.max_tokens,
        play=bounds,
        draws=name if draws is None else draws,
    )
    return trace.add(call)


@naming_arguments
def inference(
    model: object,
    rows: object,
    *,
    output: str,
    temperature: float = 1.0,
    batch_size: int | None = None,
    every: int | None = None,
    name: str | None = None,
) -> RowsHandle:
    """Run a model forward over rows. `output` names the key that this adds.

    `logprobs`, `values` and `entropy` have a number for each response token, `scores` has one for each row. You can
    register further outputs (`placement/models/outputs.py`).
    """
    trace = current_trace("inference")
    role = trace.role(model, "inference")
    check_output(trace.flow, trace.models[role], output, "inference")
    name = name or f"{role}_inference"
    check_temperature(f"flow {trace.flow}: inference {name}", temperature, (output,))
    source = trace.rows(rows, "inference", batch_size, every)
    trace.require(TOKEN_KEYS, (source,), f"inference {name}")
    call = Call(
        name=name,
        kind="inference",
        role=role,
        inputs=(source.port(source.rows),),
        outputs=(output,),
        operation=Operation(output),
        rows=source.rows,
        num_rows=source.num_rows,
        every=every,
        rows_per_item=source.rows_per_item,
        temperature=temperature,
    )
    return trace.add(call)


@naming_arguments
def score(reward: object, rows: object, *, every: int | None = None, name: str | None = None) -> RowsHandle:
    """Score each row with a reward model or with Python functions; this adds the key `scores` [B].

    `reward` is a Model, or a HostRewards: its functions run in worker processes on the node's CPUs while the devices
    compute. They receive each row with all columns of its dataset. If there are several, each adds a key with its own
    name, and `scores` is their weighted sum.
    """
    if callable(reward) and not isinstance(reward, Settings):
        expected = "a Reward parameter; the parameters name the function: reward.functions.NAME.function=FILE:FUNCTION"
        raise GraphError(f"flow {current_trace('score').flow}: score got {reward!r:.60}, expected {expected}")
    if not isinstance(reward, HostRewards):
        return inference(reward, rows, output="scores", every=every, name=name)
    trace = current_trace("score")
    name = name or "score"
    source = trace.rows(rows, "score", None, every)
    trace.require(TOKEN_KEYS, (source,), f"score {name}")
    reward = reward.absolute()
    reward.host_functions  # noqa: B018  checks the functions
    call = Call(
        name=name,
        kind="compute",
        role=None,
        inputs=(source.port(source.rows),),
        outputs=reward.outputs,
        operation=operation("score", reward),
        rows=source.rows,
        num_rows=source.num_rows,
        every=every,
        rows_per_item=source.rows_per_item,
        host_seconds=reward.seconds_per_row * source.expected_rows / reward.workers,
    )
    return trace.add(call)


@naming_arguments
def compute(
    operator: Operator[Any, Any],
    *inputs: object,
    settings: Settings,
    per: object = None,
    longest: int | None = None,
    max_new_tokens: int | None = None,
    batch_size: int | None = None,
    every: int | None = None,
    name: str | None = None,
) -> RowsHandle:
    """Run a pure function of rows on the host's CPU; it adds the keys that its @computation names.

    All inputs need the same rows. An input may also be the rows that these were made from, such as the prompts: its
    values are then repeated. A dataset contributes `batch_size` items, or all of them. With `per`, the result has a row
    for each row of `per`, and an input may have k rows for each of these, such as scores after `samples=k`: the
    function then reads a column [B, k].

    A computation that returns `tokens` and `prompt_length`, or `prompt_tokens`, makes a new row for each row. State how
    long these may be, since memory is planned for them: `longest` tokens, or `max_new_tokens` more than the inputs'
    longest row. A longer row ends the run.
    """
    trace = current_trace("compute")
    check_computation(trace, operator)
    handles = [trace.rows(rows, "compute", batch_size, every) for rows in inputs]
    operator.check_arguments(trace.flow, len(handles))
    name = name or operator.name
    if not isinstance(settings, Settings):
        expected = "a value of a Settings class, such as the flow's algo"
        raise GraphError(f"flow {trace.flow}: compute {name}: got settings={settings!r:.60}, expected {expected}")
    if not handles:
        raise GraphError(f"flow {trace.flow}: compute {name} has no input; it needs rows of a call or dataset")
    own = trace.common_rows(handles, f"compute {name}") if per is None else _parents(trace, name, per, every, handles)
    makes_rows = ROW_KEYS.intersection(operator.outputs)
    if makes_rows:
        check_not_chosen(trace, own.rows, f"compute {name}")
    limit = _row_limit(f"flow {trace.flow}: compute {name}", bool(makes_rows), handles, longest, max_new_tokens)
    rows = RowSet(name, own.rows.dataset, 1, own.rows) if makes_rows else own.rows
    call = Call(
        name=name,
        kind="compute",
        role=None,
        inputs=tuple(handle.port(rows if per is None else own.rows) for handle in handles),
        outputs=operator.outputs,
        operation=operator(settings).operation,
        rows=rows,
        num_rows=own.num_rows,
        every=every,
        stateful=operator.stateful,
        rows_per_item=own.rows_per_item,
        row_limit=limit,
    )
    return trace.add(call)


def _parents(trace: Trace, name: str, per: object, every: int | None, handles: Sequence[RowsHandle]) -> RowsHandle:
    """Return the rows that a compute makes its result for. Raises GraphError unless all inputs belong to them."""
    where = f"flow {trace.flow}: compute {name}"
    own, made = trace.rows(per, "compute", None, every), []
    for handle in handles:
        if own.rows.may_read(handle.rows):
            continue
        if own.rows.choices or handle.rows.choices:
            raise GraphError(
                f"{where}: got rows that a select keeps, expected the rows before the select, with per={own.source}"
            )
        if not handle.rows.may_read(own.rows):
            expected = f"rows made from {own.source}, or rows that it was made from: {origin_of(handle.rows)}"
            raise GraphError(f"{where}: got {handle.source} and per={own.source}, expected {expected}")
        if ROW_KEYS.intersection(handle.keys):
            several = f"{origin_of(handle.rows)}; per reads a number for each of them, such as scores"
            raise GraphError(f"{where}: got {handle.source}, which has tokens, and per={own.source}: {several}")
        made.append(handle)
    if not made:
        raise GraphError(f"{where}: per={own.source} is not used: no input has several rows for each; remove it")
    return own


def check_sampled(where: str, sampling: Sampling, samples: int) -> None:
    """Raise InvalidInput for sampling that always takes the likeliest token, because all samples of a prompt would be
    equal.
    """
    for field, (value, right) in GREEDY.items():
        if getattr(sampling, field) == value:
            expected = f"{right}, or samples=1: a prompt's {samples} greedy samples are all equal"
            raise InvalidInput(f"{where}.{field}", getattr(sampling, field), expected)


def _row_limit(
    where: str, makes_rows: bool, inputs: Sequence[RowsHandle], longest: int | None, max_new_tokens: int | None
) -> RowLimit | None:
    """Return the length limit of a computation's new rows, None if it makes no rows. Raises GraphError."""
    stated = {"longest": (longest, 1), "max_new_tokens": (max_new_tokens, 0)}
    given = {name: bounds for name, bounds in stated.items() if bounds[0] is not None}
    for name, (value, least) in given.items():
        if not makes_rows:
            raise GraphError(f"{where}: {name} is not used: the computation makes no new rows; remove it")
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise GraphError(f"{where}: got {name} {value!r:.40}, expected tokens, {least} or more")
    if not makes_rows:
        return None
    if not given:
        beyond = "max_new_tokens=..., tokens beyond the longest row of its inputs"
        raise GraphError(f"{where}: the length of the rows that it makes is missing: state longest=..., or {beyond}")
    if len(given) == 2:
        raise GraphError(f"{where}: got longest and max_new_tokens, expected one of them; remove the other")
    if max_new_tokens is not None and not any(ROW_KEYS.intersection(handle.keys) for handle in inputs):
        raise GraphError(f"{where}: got max_new_tokens, expected longest=...: its inputs have no tokens")
    return RowLimit(longest, max_new_tokens or 0)


@naming_arguments
def train_step(
    model: object,
    losses: Terms,
    *,
    optimizer: Optimizer | None = None,
    update: Update | None = None,
    name: str | None = None,
) -> None:
    """Train a model on a loss, or on a weighted sum of losses; this makes the next version of its weights.

    Write a loss with its rows, such as `policy_gradient(algo).on(rollout, advantages)`. Each optimizer step takes a
    mini-batch from every loss's rows.
    """
    trace = current_trace("train_step")
    role = trace.role(model, "train_step")
    name = name or f"{role}_train"
    given = _check_losses(trace, losses, name)
    where = [f"train_step {name}" + (f", {one.name}" if len(given.terms) > 1 else "") for one in given.terms]
    terms = tuple(_term(trace, role, place, one) for place, one in zip(where, given.terms, strict=True))
    inputs = dict.fromkeys(port for term in terms for port in term.inputs)
    check_kind(f"flow {trace.flow}: train_step {name}", "optimizer", optimizer, Optimizer, "lr=1e-5")
    check_kind(f"flow {trace.flow}: train_step {name}", "update", update, Update, "mini_batches=1")
    trace.optimizers[role] = OptimizerSpec(**(optimizer or Optimizer()).model_dump())
    update, first = update or Update(), terms[0]
    call = Call(
        name=name,
        kind="train_step",
        role=role,
        inputs=tuple(inputs),
        outputs=(),
        operation=Operation("train", parameter=trace.parameter_of(optimizer) if optimizer else ""),
        rows=first.rows,
        num_rows=first.num_rows,
        rows_per_item=math.lcm(*(term.rows_per_item for term in terms if term.rows == first.rows)),
        mini_batches=update.mini_batches,
        epochs=update.epochs,
        terms=terms,
    )
    fewest = min(part.num_items for part in call.by_row_set)
    if update.mini_batches > fewest:
        items = "rows" if call.rows_per_item == 1 else f"items of {call.rows_per_item} rows"
        expected = f"at most {fewest}, since {name} trains on {fewest} {items} a step"
        setting = trace.settings_of("mini_batches", update.mini_batches) or f"update.mini_batches of {name}"
        raise InvalidInput(setting, update.mini_batches, expected)
    trace.add(call)


@naming_arguments
def follow(model: object, leader: object, *, every: int = 1, share: float = 1.0) -> None:
    """Let a model follow a trained one: after every `every` steps it becomes (1 - share) itself + share `leader`.

    With share 1 it becomes a copy. Call it after the leader's train_step. Calls before it in the body use the version
    from earlier steps; later calls and evaluation use the newest. Compute weights are averaged in float32.

    If the leader has an adapter, the model gets an adapter of its own, with the same initial weights. A and B are then
    averaged separately, and the base stays.
    """
    trace = current_trace("follow")
    role, leading = trace.role(model, "follow"), trace.role(leader, "follow")
    where = f"flow {trace.flow}: follow({role}, {leading})"
    if role == leading:
        raise GraphError(f"{where}: got the same model twice, expected a second one, which follows the first")
    if role in trace.follows:
        raise GraphError(f"{where}: {role} follows {trace.follows[role].leader} already; a model follows a single one")
    if every is None:
        raise GraphError(f"{where}: got every=None, expected a whole number of at least 1 (steps)")
    check_whole(where, "every", every, "steps from version to version", 1)
    check_number(where, "share", share)
    if not 0 < share <= 1:
        raise GraphError(f"{where}: got share={share!r}, expected more than 0, at most 1 (a copy of {leading})")
    after = trace.calls[-1].name if trace.calls else ""
    trace.follows[role] = FollowSpec(leading, every, float(share), after)


def _check_losses(trace: Trace, losses: object, name: str) -> Terms:
    """Return the losses of a train_step. Raises GraphError, which shows the correct form."""
    where = f"flow {trace.flow}: train_step {name}"
    if isinstance(losses, Operator):
        raise GraphError(f"{where}: {losses.kind} {losses.name} has no rows; write {losses.name}(algo).on(rows)")
    if isinstance(losses, Bound):
        known = losses.operation.name
        raise GraphError(f"{where}: {known} has no rows; write {known}(algo).on(rows)")
    if not isinstance(losses, Terms):
        expected = "a loss on rows, such as policy_gradient(algo).on(rollout, advantages)"
        raise GraphError(f"{where}: got {losses!r:.80}, expected {expected}")
    names = [term.name for term in losses.terms]
    if twice := [known for known in names if names.count(known) > 1]:
        raise GraphError(f"{where}: two of its losses are named {twice[0]}; give one of them .on(..., name=...)")
    return losses


def _term(trace: Trace, role: str, where: str, given: LossOn) -> Term:
    """Convert a bound loss to the graph's `Term`. Raises GraphError if its rows or its model do not fit."""
    operator = Bound(given.operation).operator
    operator.check_arguments(trace.flow, num_inputs=len(operator.outputs) + 1)
    for output in operator.outputs:
        check_output(trace.flow, trace.models[role], output, "train_step")
    handles = [trace.rows(rows, "train_step", given.batch_size) for rows in given.rows]
    if not handles:
        raise GraphError(f"flow {trace.flow}: {where} has no input; it trains on rows: .on(rows)")
    own = trace.common_rows(handles, where)
    _check_not_of_parents(trace, where, own, handles)
    trace.require(TOKEN_KEYS, [handle for handle in handles if own.rows.per_row(handle.rows) == 1], where)
    if given.mean_over == "groups":
        trace.require(GROUP_KEYS, handles, where)
    if own.rows.adjacent % operator.rows_per_item:
        raise GraphError(
            f"flow {trace.flow}: {where}: loss {operator.name} needs {operator.rows_per_item} rows that "
            f"belong together, but {origin_of(own.rows)}"
        )
    return Term(
        name=given.name,
        operation=given.operation,
        outputs=operator.outputs,
        inputs=tuple(handle.port(own.rows) for handle in handles),
        rows=own.rows,
        num_rows=own.num_rows,
        rows_per_item=operator.rows_per_item,
        weight=given.weight,
        mean_over=given.mean_over,
        temperature=given.temperature,
    )


def _check_not_of_parents(trace: Trace, where: str, own: RowsHandle, handles: Sequence[RowsHandle]) -> None:
    """Raise GraphError for a loss on the tokens of rows, if another input has several rows for each of these rows."""
    rows_each = {handle: own.rows.per_row(handle.rows) for handle in handles if "tokens" in handle.keys}
    if rows_each and 1 not in rows_each.values():
        parents, count = next(iter(rows_each.items()))
        raise GraphError(
            f"flow {trace.flow}: {where} trains on the tokens of {parents.source}, and {own.source} has {count} rows "
            f"for each row of {parents.source}, expected 1; compute(..., per=ROWS) has a row for each of ROWS, and "
            f"reads the {count} scores of each as [B, {count}]"
        )


def check_computation(trace: Trace, operator: object) -> None:
    """Raise GraphError for any object other than a function that is marked as a computation."""
    if not isinstance(operator, Operator) or operator.kind != "computation":
        raise GraphError(f"flow {trace.flow}: got {operator!r:.80}, expected a function decorated with @computation")
