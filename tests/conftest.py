"""Fixtures that every folder of tests may use. Knows no test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sooner.cache import cache_root
from tests.tiny import make_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random Llama without an end-of-text id, made once a run."""
    return make_tiny(tmp_path_factory.mktemp("models") / "tiny", seed=0)


@pytest.fixture(scope="session", autouse=True)
def cache_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache folder for this run: models and kernels of the user's own are seen, measured costs are not, and
    whatever tests measure does not reach it."""
    own, users = tmp_path_factory.mktemp("cache"), cache_root()
    for found in users.iterdir() if users.is_dir() else ():
        if found.name != "costs":
            (own / found.name).symlink_to(found.resolve())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOONER_CACHE", str(own))
        yield
