"""Drafters by name: what is read, what is made, and what a mistyped name is told."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sooner.config import Budget
from sooner.core.edit import LawParams
from sooner.draft.combine import CombineDrafter
from sooner.draft.lookup import LookupDrafter
from sooner.draft.model import ModelDrafter
from sooner.draft.none import NoDrafter
from sooner.draft.protocol import Context
from sooner.draft.registry import NAMES, Spec, make, parse
from sooner.draft.suffix import SuffixDrafter
from sooner.draft.table import build, save
from sooner.errors import ConfigError, DraftError
from sooner.model.protocol import Model
from sooner.testing import ToyModel


def no_model(spec: Spec) -> Model:
    raise AssertionError(f"{spec} was loaded though nobody asked for it")


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("none", Spec("none")),
        ("lookup", Spec("lookup")),
        ("suffix", Spec("suffix")),
        ("suffix:1000000", Spec("suffix", "1000000")),
        ("prediction", Spec("prediction")),
        ("medusa:heads", Spec("medusa", "heads")),
        ("eagle:head", Spec("eagle", "head")),
        ("model:small", Spec("model", "small")),
        ("model:/a folder/with:colon", Spec("model", "/a folder/with:colon")),
        ("model:owner/name", Spec("model", "owner/name")),
        ("self:int4", Spec("self", "int4")),
        ("early-exit", Spec("early-exit")),
        ("early-exit:8", Spec("early-exit", "8")),
        ("auto", Spec("auto")),
        ("recycle", Spec("recycle")),
        ("recycle:./a+b.safetensors", Spec("recycle", "./a+b.safetensors")),
        ("lookup+recycle", Spec("combine", parts=(Spec("lookup"), Spec("recycle")))),
        (
            "model:a+b+recycle:t+lookup",
            Spec("combine", parts=(Spec("model", "a+b"), Spec("recycle", "t"), Spec("lookup"))),
        ),
    ],
)
def test_a_specification_is_read_and_written_back(text: str, spec: Spec) -> None:
    assert parse(text) == spec
    assert str(spec) == text


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "unknown draft ''"),
        ("lokup", "unknown draft 'lokup'. Did you mean 'lookup'?"),
        ("modell:small", "Allowed: "),
        ("Lookup", "Did you mean 'lookup'?"),
        ("nope", "Allowed: "),
        ("lookup:3", "draft 'lookup' takes no argument, got '3'"),
        ("suffix:", "write suffix or suffix:TOKENS"),
        ("suffix:many", "write suffix or suffix:TOKENS"),
        ("none:", "draft 'none' takes no argument"),
        ("medusa:", "write medusa:FOLDER"),
        ("eagle:", "write eagle:FOLDER"),
        ("model", "write model:FOLDER or model:NAME"),
        ("model:", "write model:FOLDER or model:NAME"),
        ("self", "write self:int8 or self:int4"),
        ("self:int3", "write self:int8 or self:int4"),
        ("early-exit:", "takes a number of layers, as in early-exit:8, got ''"),
        ("early-exit:0", "takes a number of layers"),
        ("early-exit:-1", "takes a number of layers"),
        ("early-exit:²", "takes a number of layers"),
        ("recycle:", "write recycle or recycle:TABLE"),
        ("combine", "unknown draft 'combine'"),
        ("lookup+", "unknown draft ''"),
        ("lookup+lokup", "Did you mean 'lookup'?"),
        ("lookup+none", "'none' cannot be joined"),
        ("auto+lookup", "'auto' cannot be joined"),
        ("lookup+suffix+lookup", "joins 'lookup' with itself"),
    ],
)
def test_a_wrong_specification_is_told_what_is_right(text: str, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make(parse(text), ToyModel(17), no_model)
    assert named in str(caught.value)


def test_every_name_is_listed_to_whoever_mistypes_one() -> None:
    with pytest.raises(ConfigError) as caught:
        parse("x")
    assert all(name in str(caught.value) for name in NAMES)


def test_names_make_their_drafters() -> None:
    assert isinstance(make(parse("none"), ToyModel(17), no_model), NoDrafter)
    assert isinstance(make(parse("lookup"), ToyModel(17), no_model), LookupDrafter)
    assert isinstance(make(parse("suffix:100"), ToyModel(17), no_model), SuffixDrafter)
    asked: list[Spec] = []

    def load(spec: Spec) -> Model:
        asked.append(spec)
        return ToyModel()

    for text in ("model:small", "self:int8", "early-exit:2"):
        drafter = make(parse(text), ToyModel(17), load)
        assert isinstance(drafter, ModelDrafter)
        assert drafter.name == asked[-1].name
    assert [str(spec) for spec in asked] == ["model:small", "self:int8", "early-exit:2"]


def test_heads_need_a_target_that_shares_its_own() -> None:
    with pytest.raises(DraftError, match="draft 'medusa' shares the target's LM head, and this target has none"):
        make(parse("medusa:heads"), ToyModel(17), no_model)


def test_a_drafter_whose_library_is_missing_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sooner.draft.suffix", None)
    with pytest.raises(ConfigError, match=r'draft .suffix. needs numba: pip install "sooner\[suffix\]"'):
        make(parse("suffix"), ToyModel(17), no_model)


def test_joined_names_make_one_drafter_of_all() -> None:
    drafter = make(parse("lookup+recycle+model:small"), ToyModel(17), lambda spec: ToyModel())
    assert isinstance(drafter, CombineDrafter)
    assert (drafter.name, drafter.tops) == ("lookup+recycle+model:small", 8)
    assert make(parse("auto"), ToyModel(17), no_model).name == "auto"


def test_a_warm_table_is_read_from_where_it_lies(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    save(build(17, {(1, 2): {3: 9.0}}, {}), path)
    drafter = make(parse(f"recycle:{path}"), ToyModel(17), no_model)
    [draft] = drafter.propose([Context("r", [1, 2], LawParams(), 0, "match")], [Budget.chain(2)])
    assert draft.tokens == (3,)
    with pytest.raises(DraftError, match="cannot be read"):
        make(parse("recycle:nowhere"), ToyModel(17), no_model)
