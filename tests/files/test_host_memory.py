"""What a host has left for new processes: the smaller of its available memory and the limits of its containers."""

import pytest

from prefect_rlhf.files.host_memory import free_memory

GIB = 1 << 30


def system(folder, available, groups, cgroup):
    """A /proc and a /sys/fs/cgroup with these files."""
    (folder / "proc" / "self").mkdir(parents=True)
    (folder / "proc" / "self" / "cgroup").write_text(cgroup)
    if available is not None:
        (folder / "proc" / "meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable:  {available >> 10} kB\n")
    for name, text in groups.items():
        file = folder / "cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return free_memory(folder / "proc", folder / "cgroup")


def version_2(folder="", limit="max", used=0, pages=0):
    return {
        f"{folder}memory.max": limit,
        f"{folder}memory.current": str(used),
        f"{folder}memory.stat": f"file {pages}\n",
    }


def test_without_a_limit_the_hosts_available_memory_counts(tmp_path):
    found = system(tmp_path, 5 * GIB, version_2("a/"), "0::/a\n")
    assert (found.num_bytes, found.limit) == (5 * GIB, "MemAvailable of /proc/meminfo")


def test_a_groups_limit_counts_less_its_use_whose_pages_of_files_can_be_given_back(tmp_path):
    found = system(tmp_path, 50 * GIB, version_2("a/", str(8 * GIB), 3 * GIB, GIB), "0::/a\n")
    assert (found.num_bytes, found.limit) == (6 * GIB, f"memory.max of {tmp_path}/cgroup/a")


def test_the_limit_of_a_group_above_counts_too(tmp_path):
    groups = version_2("a/", str(2 * GIB), GIB) | version_2("a/b/", "max")
    assert system(tmp_path, 50 * GIB, groups, "0::/a/b\n").num_bytes == GIB


def test_in_a_container_the_own_group_is_at_the_top(tmp_path):
    """Its path is the host's then, and is not to be found."""
    found = system(tmp_path, 50 * GIB, version_2("", str(4 * GIB), GIB), "0::/docker/0123\n")
    assert found.num_bytes == 3 * GIB


def test_version_1_counts_too(tmp_path):
    groups = {
        "memory/a/memory.limit_in_bytes": str(4 * GIB),
        "memory/a/memory.usage_in_bytes": str(3 * GIB),
        "memory/a/memory.stat": f"total_cache {2 * GIB}\n",
    }
    assert system(tmp_path, 50 * GIB, groups, "9:cpu:/a\n4:memory:/a\n").num_bytes == 3 * GIB


def test_an_unknown_system_has_no_memory_answer(tmp_path):
    assert system(tmp_path, None, {}, "") is None


def test_this_machine_has_an_answer():
    assert free_memory().num_bytes > 0 if free_memory() else pytest.skip("this system tells nothing")
