"""Fixtures that every folder of tests may use. Knows no test."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny import make_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random Llama without an end-of-text id, made once a run."""
    return make_tiny(tmp_path_factory.mktemp("models") / "tiny", seed=0)
