"""Pages of a run in the UI, on a real server."""

import pytest
from prefect import flow
from prefect.artifacts import Artifact

from prefect_rlhf.tasks.reporting import publish
from prefect_rlhf.tasks.server.patience import ServerAway

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect")]


@pytest.mark.parametrize("lost", ["create_markdown_artifact", "_replace_markdown"])
def test_a_page_lost_by_a_busy_server_is_replaced_by_the_next(monkeypatch, lost):
    """Also if the next has the same text. A text that the server has costs no request."""
    real, asked = getattr(publish, lost), []

    def first_fails(*args, **kwargs):
        asked.append(args)
        if len(asked) == 1:
            raise ServerAway("busy")
        return real(*args, **kwargs)

    monkeypatch.setattr(publish, lost, first_fails)
    key = f"told-{lost.strip('_').replace('_', '-')}"

    @flow(name=key)
    def shows() -> None:
        page = publish.Page(key, "Told")
        for text in ("one", "two", "two", "two"):
            page.show(text)

    shows()
    assert Artifact.get(key).data == "two"
    assert len(asked) == 2
