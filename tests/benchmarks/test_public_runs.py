"""The planner beside public runs: every report is quoted, and the estimates are as near as the page says."""

import re
from dataclasses import replace
from statistics import median

import pytest
import yaml
from pydantic import ValidationError

from benchmarks import public_runs
from prefect_rlhf.flows.hardware.runtimes import OURS, PUBLIC
from prefect_rlhf.flows.planning.record import RECORD


@pytest.fixture(scope="module")
def runs():
    return public_runs.runs()


def test_every_report_quotes_its_source_with_the_measured_seconds(runs):
    """What a report leaves open, and means over its steps, is in `assumed`."""
    assert len(runs) >= 15
    for run in runs:
        report = run.report
        assert report.source.startswith("https://") and report.settings and report.software and report.assumed
        quoted = [float(number) for number in re.findall(r"\d+\.?\d*", report.quote.replace(",", ""))]
        assert min(quoted) * 0.9 <= report.measured_seconds
        assert any(abs(number / report.measured_seconds - 1) < 0.12 for number in quoted), run.name


def test_runs_that_set_no_constant_are_within_35_percent_and_half_of_them_within_15(runs):
    apart = [run for run in runs if not run.report.fitted]
    errors = [abs(run.error(PUBLIC.efficiency)) for run in apart]
    assert len(apart) >= len(runs) // 2
    assert median(errors) <= 0.15
    assert max(errors) <= 0.35


def test_our_runtimes_step_times_are_near_public_runs(runs):
    """It was set on readings of one H100 alone, none of them public."""
    errors = [abs(run.error(OURS.efficiency)) for run in runs if ":h100" in run.report.ask]
    assert len(errors) >= 8 and median(errors) <= 0.15 and max(errors) <= 0.35


def test_the_two_constants_of_public_runs_are_what_half_of_them_fit(runs):
    fit = public_runs.fitted([run for run in runs if run.report.fitted])
    for name in public_runs.PRIOR:
        assert getattr(PUBLIC.efficiency, name) == pytest.approx(getattr(fit, name), rel=0.05)
    assert replace(PUBLIC.efficiency, **{name: getattr(OURS.efficiency, name) for name in public_runs.PRIOR}) == (
        OURS.efficiency
    )


def test_an_answers_range_comes_from_the_record(runs):
    assert public_runs.ranges(runs) == {
        kind: {"least": record.least, "most": record.most, "runs": record.runs} for kind, record in RECORD.items()
    }


def test_two_placements_of_a_report_keep_their_order(runs):
    seconds = {run.name: run.seconds(PUBLIC.efficiency) for run in runs}
    assert all(seconds[faster] < seconds[slower] for faster, slower in public_runs.SAME_REPORT)


def test_a_report_without_a_quote_is_refused():
    table = yaml.safe_load(next(public_runs.REPORTS.glob("*.yaml")).read_text())
    with pytest.raises(ValidationError, match="quote"):
        public_runs.Report.model_validate({**table, "quote": "fast"})
