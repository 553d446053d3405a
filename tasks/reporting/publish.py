"""Publishing artifacts: an unreachable server costs the run at most a picture."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar
from uuid import UUID

import httpx
from prefect import get_client
from prefect.client.schemas.actions import ArtifactUpdate
from prefect.exceptions import PrefectHTTPStatusError

from prefect_rlhf.tasks.server.patience import ServerAway, make_clients_patient

Arguments = ParamSpec("Arguments")
Artifact = TypeVar("Artifact")


def publish(
    create: Callable[Arguments, Artifact], *args: Arguments.args, **kwargs: Arguments.kwargs
) -> Artifact | None:
    """Call `create`, which waits for an unreachable server as every request does; None if the server refuses.

    Each artifact opens a new client. The retries are safe, because a running flow has already reached its server.
    """
    make_clients_patient()
    try:
        return create(*args, **kwargs)
    except (ServerAway, httpx.TransportError, PrefectHTTPStatusError):
        return None


def update_markdown(artifact: UUID, markdown: str) -> None:
    """Replace the text of a Markdown artifact, as Prefect itself does with a progress bar."""
    with get_client(sync_client=True) as client:
        client.update_artifact(artifact, ArtifactUpdate(data=markdown))
