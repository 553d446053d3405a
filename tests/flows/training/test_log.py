"""What engines warn of is in the run's log, once."""

import logging

import pytest

from prefect_rlhf.flows.training import log
from prefect_rlhf.flows.training.log import engines_in_log

pytestmark = pytest.mark.quick


def test_warnings_of_engines_go_to_the_runs_log_and_to_no_other_while_it_is_open(monkeypatch, caplog):
    lines = []
    monkeypatch.setattr(log, "log_warning", lines.append)
    storage = logging.getLogger("prefect_rlhf.files.storage.patience")
    with engines_in_log():
        storage.warning("%s: waits", "s3://bucket")
        storage.debug("nobody's business")
    assert lines == ["s3://bucket: waits"] and not caplog.records
    storage.warning("after it")
    assert len(lines) == 1 and [record.getMessage() for record in caplog.records] == ["after it"]
