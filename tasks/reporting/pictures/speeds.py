"""Shows the speed of calls and of an iteration: a table of calls, a line for the iteration."""

from collections.abc import Iterable, Mapping, Sequence

from prefect_rlhf.placement.schedule.throughput import CallSpeed, IterationWork


def speed_cells(speed: CallSpeed | None) -> dict[str, str]:
    """Return a call's cells for a table, empty for unknown values.

    >>> speed_cells(CallSpeed("actor_train", 2.0, 0.25, 65536.0, 0.412))
    {'seconds': '2.000', 'share': '25%', 'tokens/s': '65,536', 'MFU': '41.2%'}
    """
    if speed is None:
        return dict.fromkeys(("seconds", "share", "tokens/s", "MFU"), "")
    return {
        "seconds": f"{speed.seconds:.3f}",
        "share": f"{speed.share:.0%}",
        "tokens/s": "" if speed.tokens_per_second is None else f"{speed.tokens_per_second:,.0f}",
        "MFU": "" if speed.utilisation is None else f"{speed.utilisation:.1%}",
    }


def with_speeds(rows: Iterable[Mapping[str, str]], speeds: Mapping[str, CallSpeed]) -> list[dict[str, str]]:
    """Add the cells of each call's speed to the rows of a plan's table.

    A column without any entry is left out.
    """
    return _without_empty([{**row, **speed_cells(speeds.get(row["call"]))} for row in rows])


def speed_rows(speeds: Iterable[CallSpeed]) -> list[dict[str, str]]:
    """Return a row for each call; a column without any entry is left out."""
    return _without_empty([{"call": speed.call, **speed_cells(speed)} for speed in speeds])


def _without_empty(rows: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    return [{title: row[title] for title in row if any(other[title] for other in rows)} for row in rows]


def iteration_text(work: IterationWork, seconds: float) -> str:
    """Return a line with an iteration's throughput and, if known, its price."""
    rate, dollars = work.response_tokens / seconds, work.dollars_per_million(seconds)
    of_responses = f" ({rate:,.0f} of responses)" if work.response_tokens < work.tokens else ""
    line = f"{work.tokens / seconds:,.0f} tokens/s{of_responses}, {work.samples / seconds:.4g} samples/s"
    if dollars is None:
        return line
    return f"{line}; {money(dollars)} per million response tokens at {money(work.dollars_per_hour)} an hour"


def money(dollars: float | None) -> str:
    """Format dollars with cents, or with three digits below ten cents.

    >>> money(20), money(0.0123), money(None)
    ('$20.00', '$0.0123', '-')
    """
    if dollars is None:
        return "-"
    return f"${dollars:,.2f}" if dollars >= 0.1 else f"${dollars:.3g}"
