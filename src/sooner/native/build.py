"""Compiles a C file of this folder once and loads it. Knows nothing of what it computes.

The library is kept in the cache folder under a name made of the source, the compiler, its flags and the processor,
so that a new version, machine or compiler makes a new one. Without a compiler there is none, and callers
go on without: every kernel has a torch path beside it, which is also its oracle in the tests.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from sooner.cache import cache_root

FOLDER = Path(__file__).parent
FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-fPIC", "-shared")
_SECONDS = 120  # a compiler that takes longer is given up


@functools.cache
def library(source: str, *defines: str) -> ctypes.CDLL | None:
    """The loaded library of `source` (a file name in this folder), or None where it cannot be had.

    defines: "NAME=VALUE" for the preprocessor. SOONER_NATIVE=0 in the environment says: never.
    """
    compiler = _compiler()
    if compiler is None or os.environ.get("SOONER_NATIVE") == "0":
        return None
    folder = cache_root() / "native"
    done = folder / f"{Path(source).stem}-{_fingerprint(compiler, defines)}.so"
    try:
        if not done.is_file():
            _compile(compiler, source, defines, done)
        return ctypes.CDLL(str(done))
    except (OSError, subprocess.SubprocessError) as error:
        logging.getLogger("sooner").warning("%s is not used, its torch path is (slower): %s", source, error)
        return None


def _compile(compiler: str, source: str, defines: tuple[str, ...], done: Path) -> None:
    """Compile beside the final place and rename, so that nobody loads half a file."""
    done.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=done.parent) as scratch:
        made = Path(scratch) / done.name
        options = [*FLAGS, *(f"-D{define}" for define in defines), str(FOLDER / source), "-o", str(made), "-lm"]
        for openmp in ("-fopenmp", ""):  # clang on a Mac comes without OpenMP: one thread then
            command = [compiler, *([openmp] if openmp else []), *options]
            ended = subprocess.run(command, capture_output=True, timeout=_SECONDS, check=False)
            if ended.returncode == 0:
                os.replace(made, done)
                return
    said = ended.stderr.decode(errors="replace").strip().splitlines()
    raise OSError(f"{compiler} could not compile it: {said[0] if said else ended.returncode}")


def _compiler() -> str | None:
    named = os.environ.get("CC")
    return shutil.which(named) if named else shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


@functools.cache
def sources() -> str:
    """A digest of all C files here: what was measured of one version says little of the next."""
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in sorted(FOLDER.glob("*.[ch]")))).hexdigest()[:16]


def _fingerprint(compiler: str, defines: tuple[str, ...]) -> str:
    """What the compiled code depends on. The processor counts: -march=native means this one."""
    version = subprocess.run([compiler, "--version"], capture_output=True, timeout=_SECONDS, check=False).stdout
    parts = [version, _processor(), " ".join((*FLAGS, *defines)).encode(), sources().encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _processor() -> bytes:
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}".encode()
    return b"".join(
        next((line for line in lines if line.startswith(key)), b"") for key in (b"model name", b"flags")
    )
