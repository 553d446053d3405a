"""How much memory this host, or its container's limit, has left for new processes."""

from dataclasses import dataclass
from pathlib import Path

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """How many bytes processes may use now (`num_bytes`), and what limits them, in words."""

    num_bytes: int
    limit: str


def free_memory(proc: Path = PROC, cgroups: Path = CGROUPS) -> FreeMemory | None:
    """Return the host's available memory or what its control group's limit leaves, whichever is smaller.

    The group's file pages can be reclaimed, so they count as free. None if the system reports neither.
    """
    found = [each for each in (_available(proc), *_left_in_groups(proc, cgroups)) if each is not None]
    return min(found, key=lambda each: each.num_bytes, default=None)


def _available(proc: Path) -> FreeMemory | None:
    for line in _text(proc / "meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return FreeMemory(int(line.split()[1]) * 1024, "MemAvailable of /proc/meminfo")
    return None


def _left_in_groups(proc: Path, cgroups: Path) -> list[FreeMemory]:
    """What the control group's limits leave, including those of groups above it, in version 2 and version 1."""
    left = []
    for line in _text(proc / "self" / "cgroup").splitlines():
        _, kinds, own = line.split(":", 2)
        if kinds not in ("", "memory"):
            continue
        top = cgroups / kinds
        limit, used, files = (
            ("memory.max", "memory.current", "file")
            if not kinds
            else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache")
        )
        group = top / own.lstrip("/")
        for folder in [each for each in (group, *group.parents) if each == top or top in each.parents]:
            most, now = _text(folder / limit).strip(), _text(folder / used).strip()
            if most.isdigit() and now.isdigit():
                stat = dict(
                    pair for line in _text(folder / "memory.stat").splitlines() if len(pair := line.split()) == 2
                )
                free = int(most) - int(now) + int(stat.get(files, 0))
                left.append(FreeMemory(max(0, free), f"{limit} of {folder}"))
    return left


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
