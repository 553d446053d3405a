"""The Hub's errors in a line each, with the command or the page that helps."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from prefect_rlhf.errors.errors import InvalidInput, RlhfError
from prefect_rlhf.files.hub.hub_path import SCHEME, HubPath

LOGIN = "`hf auth login`, or HF_TOKEN in the environment"


@contextmanager
def explained(place: HubPath, field: str, seen: str, how_far: Callable[[], str] = lambda: "") -> Iterator[None]:
    """Convert the body's errors of the Hub, of the network and of the cache to InvalidInput, at `field`.

    `how_far` says how much of a download had arrived.
    """
    try:
        yield
    except RlhfError:
        raise
    except Exception as error:
        raise InvalidInput(field, seen, expected_of(error, place, seen, how_far)) from error


def expected_of(error: Exception, place: HubPath, seen: str, how_far: Callable[[], str]) -> str:
    """Return what would be right instead of `seen`, with the error's text if that says more."""
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

    causes = list(_causes(error))
    answer = next((cause for cause in causes if isinstance(cause, HfHubHTTPError)), None)
    if answer is None:
        return _without_answer(causes, place, seen, how_far)
    if isinstance(answer, GatedRepoError):
        return f"a {place.kind} that you may read: accept its terms at {_page(place)}, then {LOGIN}"
    if isinstance(answer, RepositoryNotFoundError):
        return _not_found(place, seen)
    if isinstance(answer, RevisionNotFoundError):
        branches = f"{_page(place)}/tree/main lists them"
        return f"a branch, a tag or a commit of {place.repo} after the @ ({branches})"
    return _of_status(answer.response.status_code, answer, place)


def _of_status(status: int, answer: Exception, place: HubPath) -> str:
    if status == 401:
        return f"a valid token of the Hub, or no token: {LOGIN}"
    if status == 403:
        return f"a token with permission to read {place.repo}: {LOGIN}"
    if status == 429:
        return f"fewer requests to the Hub; a token has a higher limit: {LOGIN} ({_text(answer)})"
    return f"a Hub that answers ({_text(answer)}); files that have arrived are kept, so start again"


def _without_answer(causes: list[BaseException], place: HubPath, seen: str, how_far: Callable[[], str]) -> str:
    import httpx2
    from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled, RevisionResolutionError

    here = f"a {place.kind} in the Hub's cache on this machine"
    here = f"a folder that exists, or {here}" if _is_plain(seen) else here
    if any(isinstance(cause, OfflineModeIsEnabled) for cause in causes):
        return f"{here}, because HF_HUB_OFFLINE is set; with a network: {place.command}"
    for cause in causes:
        if isinstance(cause, httpx2.HTTPError):
            away = f"a Hub that answers at {_endpoint()} ({_text(cause)}{how_far()})"
            return f"{away}, or {here}; with a network: {place.command}"
    for cause in causes:
        if isinstance(cause, OSError) and cause.errno is not None:
            return _of_disk(cause, place, how_far)
    if any(isinstance(cause, LocalEntryNotFoundError | RevisionResolutionError) for cause in causes):
        return f"{here}; with a network: {place.command} ({_text(causes[0])})"
    if isinstance(causes[0], OSError):  # such as a file of another length than the Hub says
        return f"a {place.kind} that arrives whole ({_text(causes[0])}{how_far()}); start again"
    return f"the address of a Hub in HF_ENDPOINT; {_endpoint()} does not answer like a Hub ({_text(causes[0])})"


def _of_disk(error: OSError, place: HubPath, how_far: Callable[[], str]) -> str:
    cache = cache_of_hub()
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"room for {place.repo} in {cache} (HF_HOME names another place){how_far()}"
    return f"a cache that this user can write: {cache}, or another place in HF_HOME ({error.strerror})"


def _not_found(place: HubPath, seen: str) -> str:
    private = f"if it is private, {LOGIN}"
    if _is_plain(seen):
        folder, name = f"a folder that exists in {Path.cwd()}", f"the name of a {place.kind} on {_endpoint()}"
        return f"{folder}, or {name}, which has no {place.kind} of this name; {private}"
    return f"a {place.kind} that exists: {_endpoint()} has no {place.repo}; {private}"


def _is_plain(seen: str) -> bool:
    """Whether a person may have meant a folder: the text has no scheme."""
    return not seen.startswith(SCHEME)


def _page(place: HubPath) -> str:
    return f"{_endpoint()}/{place.page}"


def _endpoint() -> str:
    from huggingface_hub import constants

    return constants.ENDPOINT


def cache_of_hub() -> Path:
    """Return the folder of the Hub's cache on this machine."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _text(error: BaseException) -> str:
    """Return an error's type and first sentence, without the addresses of files, which may carry signatures."""
    said = re.sub(r"\?\S+", "", " ".join(str(error).split())).partition(" For more information")[0]
    return f"{type(error).__name__}: {said:.160}"
