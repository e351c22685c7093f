"""What stands in C stands in Python too: every test of the controller is run with both."""

from __future__ import annotations

import pytest

from sooner.control import belief as beliefs
from sooner.control import filter as filters
from sooner.control import passes


@pytest.fixture(autouse=True, params=["in C", "in Python"] if filters.serves() else ["in Python"])
def counting(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "in Python":
        for module in (filters, beliefs, passes):
            monkeypatch.setattr(module, "serves", lambda: False)
