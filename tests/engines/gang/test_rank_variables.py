"""The variables of ranks that concern the Hub: libraries may not ask it, our own code does what the user wants."""

import pytest

from prefect_rlhf.engines.gang import open as opening
from prefect_rlhf.files.hub.session import WISH


@pytest.mark.parametrize("wish", ["", "1"])
def test_ranks_know_whether_their_user_is_offline_although_their_libraries_always_are(monkeypatch, wish):
    monkeypatch.delenv(WISH, raising=False)
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", wish)
    monkeypatch.setattr(opening, "LocalGang", lambda settings: settings)
    first = opening.open_gang((2,), rank_factory=object, device="cpu").environment
    assert (first["HF_HUB_OFFLINE"], first[WISH]) == ("1", wish)
    for name in ("HF_HUB_OFFLINE", WISH):  # a gang in this process leaves them here
        monkeypatch.setenv(name, first[name])
    assert opening.open_gang((2,), rank_factory=object, device="cpu").environment[WISH] == wish
