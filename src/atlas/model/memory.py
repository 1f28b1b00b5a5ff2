"""What a model takes of the machine's memory, and what there is."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass

from atlas.errors import OutOfMemoryError

_UNLIMITED = 2**63


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes a loaded model takes, before anything is allocated where possible."""

    weights: int
    kv_pool: int
    buffers: int
    recurrent: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.kv_pool + self.buffers + self.recurrent

    def require_room(self, free: int, held: int = 0) -> None:
        """Refuse a plan larger than the bytes ``free`` now and the ``held`` bytes of it.

        Raises
        ------
        OutOfMemoryError
            With the plan's numbers.
        """
        if self.total > free + held:
            raise self.refusal(f"{free / 2**20:.0f} MiB are free")

    def refusal(self, reason: str) -> OutOfMemoryError:
        """The error that says what was planned and why it cannot be."""
        recurrent, lower = "", "kv_tokens, max_seq_len or chunk_tokens"
        if self.recurrent:
            recurrent = f"recurrent state {self.recurrent / 2**20:.0f} MiB, "
            lower = "kv_tokens, max_seq_len, chunk_tokens, max_running or state_snapshots"
        return OutOfMemoryError(
            f"weights need {self.weights / 2**20:.0f} MiB, {recurrent}the KV cache "
            f"{self.kv_pool / 2**20:.0f} MiB and buffers {self.buffers / 2**20:.0f} MiB; "
            f"{reason}; lower {lower}, or quantize"
        )


def available_memory() -> int:
    """Bytes that can be allocated now: the system's estimate, within a cgroup's limit."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    free = int(line.split()[1]) * 1024
    except OSError:
        return free
    return min(free, _cgroup_room())


def return_freed_memory() -> None:
    """Give the system what was freed but is kept for later; glibc does so only at its heap's end.

    Worth it once after parsing a vocabulary, which leaves about 10 MB in holes.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _cgroup_room() -> int:
    """Bytes up to the limit of this process's cgroup; cached file pages give way."""
    folder = "/sys/fs/cgroup"
    try:
        with open(f"{folder}/memory.max") as file:
            limit = file.read().strip()
        if limit == "max":
            return _UNLIMITED
        with open(f"{folder}/memory.current") as file:
            used = int(file.read())
        with open(f"{folder}/memory.stat") as file:
            counts = dict(line.split() for line in file)
    except OSError:
        return _UNLIMITED
    return max(0, int(limit) - used + int(counts.get("inactive_file", 0)))
