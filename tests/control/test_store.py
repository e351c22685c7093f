"""Costs kept between runs: what comes back, and that a bad file costs knowledge alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from sooner.control.cost import Asked
from sooner.control.passes import Load
from sooner.control.store import CostFile
from tests.control.test_passes import learnt

KEY = ("model", "bfloat16", "cpu", "2 threads")
LOAD = Load(9, 2, 400)


def kept(folder: Path, drafter: str = "lookup") -> CostFile:
    file = CostFile(folder, KEY, drafter)
    learnt(cost=file.costs.passes)
    for _ in range(10):
        file.costs.drafts.observe(Asked(2, 4), 0.004)
    file.save()
    return file


def test_the_next_start_knows_the_costs(tmp_path: Path) -> None:
    before, again = kept(tmp_path).costs, CostFile(tmp_path, KEY, "lookup").costs
    assert again.passes.seconds(LOAD) == pytest.approx(before.passes.seconds(LOAD), rel=1e-9)
    assert again.drafts.seconds(Asked(2, 4)) == before.drafts.seconds(Asked(2, 4))


def test_another_machine_or_drafter_does_not(tmp_path: Path) -> None:
    kept(tmp_path)
    other = CostFile(tmp_path, (*KEY[:-1], "16 threads"), "lookup").costs
    assert not other.passes.known
    drafter = CostFile(tmp_path, KEY, "medusa").costs
    assert drafter.passes.known
    assert drafter.drafts.seconds(Asked(2, 4)) == 0


def test_what_is_known_of_other_drafters_stays(tmp_path: Path) -> None:
    kept(tmp_path)
    kept(tmp_path, "medusa")
    assert CostFile(tmp_path, KEY, "lookup").costs.drafts.seconds(Asked(2, 4)) > 0


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"key": 5}', '{"key": %s, "passes": {"knots": 1}, "drafts": 3}']
)
def test_a_spoilt_file_is_as_good_as_none(tmp_path: Path, content: str) -> None:
    file = kept(tmp_path)
    [path] = tmp_path.iterdir()
    path.write_text(content.replace("%s", str(list(KEY)).replace("'", '"')))
    again = CostFile(tmp_path, KEY, "lookup")
    assert not again.costs.passes.known
    again.costs.passes.observe(LOAD, 0.1)
    again.save()
    assert CostFile(tmp_path, KEY, "lookup").costs.passes.known
    assert file.costs.passes.known


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    kept(tmp_path / "file" / "costs")


def test_it_is_saved_now_and_then_without_being_asked(tmp_path: Path) -> None:
    file = CostFile(tmp_path, KEY, "lookup")
    file.save_if_due()
    assert not list(tmp_path.iterdir())
    learnt(passes=60, cost=file.costs.passes)
    file.save_if_due()
    assert len(list(tmp_path.iterdir())) == 1
