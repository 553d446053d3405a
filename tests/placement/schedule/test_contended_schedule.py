"""Jobs that slow each other while they run at once, against the closed form of a shared processor."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefect_rlhf.placement.schedule.list_schedule import Job, job_spans
from tests.placement.schedule.test_schedule import job_lists
from tests.support.cases import examples


def one_core(running):
    return [float(len(running))] * len(running)


@given(st.lists(st.floats(0.0, 10.0), min_size=1, max_size=8))
def test_jobs_that_share_a_core_end_as_on_a_shared_processor(seconds):
    """Each has had as much as any that goes on longer: the n-th to end, all that they had until then, and no less."""
    spans = job_spans([Job(1 << index, each) for index, each in enumerate(seconds)], one_core)
    expected = [sum(min(each, other) for other in seconds) for each in seconds]
    assert [span.end for span in spans] == pytest.approx(expected)
    assert {span.start for span in spans} == {0.0}


@given(job_lists())
@settings(max_examples=examples(100), deadline=None)
def test_contention_without_slowdown_keeps_the_schedule(jobs):
    spans = job_spans(jobs, lambda running: [1.0] * len(running))
    assert [span.start for span in spans] == [span.start for span in job_spans(jobs)]
    assert [span.end for span in spans] == [span.start + job.seconds for span, job in zip(spans, jobs, strict=True)]


@given(job_lists())
@settings(max_examples=examples(100), deadline=None)
def test_no_job_ends_sooner_than_alone_or_than_its_dependencies(jobs):
    spans = job_spans(jobs, one_core)
    for span, job in zip(spans, jobs, strict=True):
        assert span.end - span.start >= job.seconds - 1e-9
        assert all(spans[before].end <= span.start for before in job.after)


def test_a_later_job_slows_only_remaining_work():
    """Two seconds alone, then side by side at half the speed."""
    first, wait, second = Job(0b01, 4.0), Job(0b10, 2.0), Job(0b10, 1.0, after=(1,))
    spans = job_spans([first, wait, second], lambda running: [2.0 if {0, 2} <= set(running) else 1.0] * len(running))
    assert [(span.start, span.end) for span in spans] == [(0.0, 5.0), (0.0, 2.0), (2.0, 4.0)]
