"""The front door: what `import sooner` offers, sorted, documented and complete."""

from __future__ import annotations

import inspect

import sooner
import sooner.testing


def test_all_names_exist() -> None:
    assert len(set(sooner.__all__)) == len(sooner.__all__)
    for name in sooner.__all__:
        assert getattr(sooner, name) is not None


def test_everything_public_is_documented() -> None:
    for module in (sooner, sooner.testing):
        for name in module.__all__:
            thing = getattr(module, name)
            if inspect.isclass(thing) or inspect.isfunction(thing):
                assert thing.__doc__, name


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(sooner, "Nonsense")
