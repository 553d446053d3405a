"""Each message that docs/troubleshooting.md quotes is in the sources."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
QUOTED = re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)
SOURCES = [
    file.read_text()
    for room in ("flows", "tasks", "blocks", "engines", "placement")
    for file in (ROOT / room).rglob("*.py")
]


@pytest.mark.parametrize("message", QUOTED)
def test_a_quoted_message_is_in_the_sources(message):
    assert any(message in text for text in SOURCES)
