"""Publishes artifacts. If the server is unreachable, the run loses a picture at most."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar
from uuid import UUID

import httpx
from prefect import get_client
from prefect.artifacts import create_markdown_artifact
from prefect.client.schemas.actions import ArtifactUpdate
from prefect.exceptions import PrefectHTTPStatusError

from prefect_rlhf.tasks.server.patience import ServerAway, make_clients_patient

Arguments = ParamSpec("Arguments")
Artifact = TypeVar("Artifact")


def publish(
    create: Callable[Arguments, Artifact], *args: Arguments.args, **kwargs: Arguments.kwargs
) -> Artifact | None:
    """Call `create`, waiting for an unreachable server as every request does; return None if the server refuses.

    Each artifact opens a new client. Retries are safe, because a running flow has already reached its server.
    """
    make_clients_patient()
    try:
        return create(*args, **kwargs)
    except (ServerAway, httpx.TransportError, PrefectHTTPStatusError):
        return None


class Page:
    """A Markdown artifact that is replaced as the run goes on. A lost request does no harm, because the next replaces
    it.
    """

    def __init__(self, key: str, description: str) -> None:
        self._key, self._description = key, description
        self._artifact: UUID | None = None
        self._shown: str | None = None

    def show(self, markdown: str) -> None:
        """Create the artifact or replace its text; no request if the server has this text."""
        if markdown == self._shown:
            return
        if self._artifact is None:
            created = publish(create_markdown_artifact, markdown, key=self._key, description=self._description)
            self._artifact = created if isinstance(created, UUID) else None
            self._shown = markdown if self._artifact is not None else None
        elif publish(_replace_markdown, self._artifact, markdown):
            self._shown = markdown


def _replace_markdown(artifact: UUID, markdown: str) -> bool:
    """Replace the text of a Markdown artifact, as Prefect itself does with a progress bar."""
    with get_client(sync_client=True) as client:
        client.update_artifact(artifact, ArtifactUpdate(data=markdown))
    return True
