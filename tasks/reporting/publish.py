"""Publishing artifacts: a server that is away costs the run a picture at most."""

from __future__ import annotations

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
    """Call `create`, which waits for a server that is away as every request does; None where the server refuses.

    Each artifact opens a new client; where a flow runs, its server was there.
    """
    make_clients_patient()
    try:
        return create(*args, **kwargs)
    except (ServerAway, httpx.TransportError, PrefectHTTPStatusError):
        return None


def update_markdown(artifact: UUID, markdown: str) -> None:
    """Put another text in a Markdown artifact's place, as Prefect itself does with a bar that moves."""
    with get_client(sync_client=True) as client:
        client.update_artifact(artifact, ArtifactUpdate(data=markdown))
