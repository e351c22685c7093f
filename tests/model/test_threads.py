"""Threads: quotas are read, a choice is obeyed, and threads that wait for each other are given up."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sooner.errors import ConfigError
from sooner.model import threads


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    threads.worthwhile.cache_clear()
    yield
    threads.worthwhile.cache_clear()
    torch.set_num_threads(before)


def timed(monkeypatch: pytest.MonkeyPatch, alone: float, together: float) -> list[int]:
    """Pretend that products take these times; returns the thread counts that were timed."""
    asked: list[int] = []

    def seconds(count: int) -> float:
        asked.append(count)
        return alone if count == 1 else together

    monkeypatch.setattr(threads, "seconds", seconds)
    monkeypatch.setattr(threads, "granted", lambda: 4)
    torch.set_num_threads(4)
    return asked


def test_threads_that_wait_for_each_other_are_given_up_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    timed(monkeypatch, alone=0.01, together=1.0)
    with caplog.at_level(logging.WARNING, "sooner"):
        assert threads.use(None) == torch.get_num_threads() == 1
    assert "4 threads take 100.0 times as long as one" in caplog.text
    assert "--threads" in caplog.text


def test_threads_that_pay_are_kept_and_timed_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = timed(monkeypatch, alone=0.01, together=0.006)
    assert threads.use(None) == torch.get_num_threads() == 4
    assert threads.use(None) == 4
    assert asked == [1, 4]
    assert not caplog.records


def test_a_number_is_taken_at_its_word_and_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = timed(monkeypatch, alone=0.01, together=1.0)
    assert threads.use(3) == torch.get_num_threads() == 3
    assert asked == []


def test_the_environment_is_an_answer_already(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = timed(monkeypatch, alone=0.01, together=1.0)
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert threads.use(None) == 4
    assert asked == []


def test_no_more_threads_than_the_machine_grants(monkeypatch: pytest.MonkeyPatch) -> None:
    timed(monkeypatch, alone=0.01, together=0.006)
    monkeypatch.setattr(threads, "granted", lambda: 2)
    assert threads.use(None) == 2


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, 1025, "2"])
def test_a_number_that_makes_no_sense_is_refused(wrong: object) -> None:
    with pytest.raises(ConfigError, match="threads must be a whole number from 1 to 1024"):
        threads.use(wrong)  # type: ignore[arg-type]  # what users may write


def test_rounds_that_went_badly_count_but_for_the_worst() -> None:
    # Eight rounds: a start and an end each. One of 5 s is a hiccup, two of 2 s are not.
    rounds = [1.0, 1.0, 5.0, 1.0, 2.0, 1.0, 2.0, 1.0]
    moments = [at for i, taken in enumerate(rounds) for at in (10.0 * i, 10.0 * i + taken)]
    assert threads.seconds(1, iter(moments).__next__) == pytest.approx(9.0)


def group(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_the_smallest_quota_on_the_way_up_counts(tmp_path: Path) -> None:
    own = tmp_path / "cgroup"
    own.write_text("0::/pod/box\n")
    root = tmp_path / "fs"
    group(root / "pod" / "box", cpu__max="400000 100000\n")
    assert threads.quota(root, own) == 4.0
    group(root / "pod", cpu__max="150000 100000\n")
    assert threads.quota(root, own) == 1.5
    group(root / "pod", cpu__max="max 100000\n")
    assert threads.quota(root, own) == 4.0


def test_quotas_of_version_1_are_read_too(tmp_path: Path) -> None:
    own = tmp_path / "cgroup"
    own.write_text("5:memory:/box\n4:cpu,cpuacct:/box\n")
    root = tmp_path / "fs"
    group(root / "cpu" / "box", cpu__cfs_quota_us="250000\n", cpu__cfs_period_us="100000\n")
    group(root / "memory" / "box", cpu__max="1 100000\n")
    assert threads.quota(root, own) == 2.5
    group(root / "cpu" / "box", cpu__cfs_quota_us="-1\n")
    assert threads.quota(root, own) == math.inf


def test_without_control_groups_there_is_no_quota(tmp_path: Path) -> None:
    assert threads.quota(tmp_path / "nothing", tmp_path / "none") == math.inf
    assert threads.granted() >= 1


def test_a_quota_below_one_core_still_grants_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "quota", lambda: 0.4)
    assert threads.granted() == 1
