"""How many threads compute: what the machine grants, and whether more than one pays. Knows no model.

Threads of one operation wait for each other many times a pass. Where other work holds the cores, each wait may
last a time slice of the scheduler, and two threads can take a hundred times as long as one.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import torch

from sooner.errors import ConfigError

logger = logging.getLogger("sooner")

MAX_THREADS = 1024

_ROUNDS, _REPEATS = 8, 10
_SLOWER = 1.3  # several threads that take so many times as long as one do not pay
_SIZES = (8, 576, 1536)  # rows, inputs and outputs of the product that is timed: one layer of a small model


def use(threads: int | None) -> int:
    """Set the number of threads torch computes with, for the whole process; returns it.

    None: as many as the machine grants, or one where several take longer than one does; OMP_NUM_THREADS is
    an answer already and is left alone. Raises ConfigError for a number out of range.
    """
    if threads is not None:
        if isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= MAX_THREADS:
            raise ConfigError(f"threads must be a whole number from 1 to {MAX_THREADS}, got {threads!r}.")
        torch.set_num_threads(threads)
    elif not os.environ.get("OMP_NUM_THREADS"):
        wanted = min(torch.get_num_threads(), granted())
        torch.set_num_threads(wanted if wanted == 1 else worthwhile(wanted))
    return torch.get_num_threads()


def granted() -> int:
    """Cores this process may use: its affinity, and the quota of its control group; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min(cores, quota())))


def quota(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> float:
    """Cores' worth of time that control groups allow, infinite without a limit.

    root: where control groups are mounted. own: the list of this process's groups. A limit may stand at
    the group itself or at any group above it; the smallest counts.
    """
    least = math.inf
    for line in _read(own).splitlines():
        _, _, controllers_path = line.partition(":")
        controllers, _, path = controllers_path.partition(":")
        base = root if not controllers else root / "cpu"
        if controllers and "cpu" not in controllers.split(","):
            continue
        group = base / path.lstrip("/")
        for folder in (group, *group.parents):
            least = min(least, _limit(folder))
            if folder == base:
                break
    return least


def _limit(folder: Path) -> float:
    """The quota of one control group: cpu.max ("quota period", version 2) or cpu.cfs_* (version 1)."""
    words = _read(folder / "cpu.max").split()
    if not words:
        words = (_read(folder / "cpu.cfs_quota_us") + " " + _read(folder / "cpu.cfs_period_us")).split()
    if len(words) != 2 or not all(word.isdigit() for word in words) or not int(words[1]):
        return math.inf  # "max" or -1: no limit
    return int(words[0]) / int(words[1])


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


@lru_cache(maxsize=1)
def worthwhile(threads: int) -> int:
    """`threads`, or 1 with a warning where a small product takes longer with `threads` than with one."""
    before = torch.get_num_threads()
    try:
        alone, together = seconds(1), seconds(threads)
    finally:
        torch.set_num_threads(before)
    if together <= _SLOWER * alone:
        return threads
    logger.warning(
        "%d threads take %.1f times as long as one here (load %s): using one. Set the number with --threads, "
        "threads= or OMP_NUM_THREADS.",
        threads,
        together / alone,
        _load(),
    )
    return 1


def seconds(threads: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds that some small products take with so many threads: the sum of some rounds, but the worst.

    The best round would be the wrong one: where cores are shared, some rounds always go well.
    """
    rows, inputs, outputs = _SIZES
    x, weight = torch.ones(rows, inputs), torch.ones(outputs, inputs)
    torch.set_num_threads(threads)
    torch.nn.functional.linear(x, weight)  # starts the threads
    taken = []
    for _ in range(_ROUNDS):
        began = clock()
        for _ in range(_REPEATS):
            torch.nn.functional.linear(x, weight)
        taken.append(clock() - began)
    return sum(taken) - max(taken)


def _load() -> str:
    try:
        return f"{os.getloadavg()[0]:.1f}"
    except OSError:
        return "unknown"
