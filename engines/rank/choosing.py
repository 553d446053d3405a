"""Which rows a select keeps: its computation returns places, but the controller needs row numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from prefect_rlhf.engines.commands import CallCommand
from prefect_rlhf.errors.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class Chosen:
    """The kept rows' numbers."""

    rows: tuple[int, ...]
    metrics: dict[str, float]


def choose(command: CallCommand, places: Tensor | Sequence[Tensor]) -> Chosen:
    """Return the rows that a call keeps, given Booleans or places [B]; see Choice.kept.

    Metrics: `kept_rows`, `kept_groups`, and `kept_share`, the kept part of the call's rows. Raises InvalidInput for
    more than a number per row.
    """
    call, rows = command.call, command.rows
    assert call.chooses is not None and call.chooses.choice is not None  # the caller has checked
    choice, groups = call.chooses.choice, call.rows.groups(rows)
    if isinstance(places, Tensor) and places.dim() != 1:
        expected = f"[{len(rows)}]: a truth value or a number for each row"
        raise InvalidInput(f"{command.doing}: shape of keep", list(places.shape), expected)
    kept = choice.kept([float(place) for place in places], rows, groups)
    metrics = {
        "kept_rows": float(len(kept)),
        "kept_groups": float(len(set(call.rows.groups(kept)))),
        "kept_share": len(kept) / len(rows) if rows else 0.0,
    }
    return Chosen(kept, metrics)
