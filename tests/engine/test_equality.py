"""Every text equals the plain loop, whatever is drafted and whoever comes, goes or fails meanwhile."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sooner.config import EngineConfig
from tests.engine.traffic import Setting, Traffic

configs = st.builds(
    lambda requests, spare, chunk: EngineConfig(requests, requests + spare, chunk),
    requests=st.integers(1, 6),
    spare=st.integers(0, 60),
    chunk=st.integers(1, 40),
)
traffic = st.builds(
    Setting,
    seed=st.integers(0, 2**32),
    vocab=st.integers(2, 17),
    order=st.sampled_from([1, 3]),
    requests=st.integers(1, 7),
    config=configs,
    context_limit=st.sampled_from([None, None, 2, 20, 34]),
    eos=st.sampled_from([(), (), (0,), (1, 0)]),
    trouble=st.sampled_from([0.0, 0.0, 0.1, 0.4]),
)


@settings(max_examples=500, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(traffic)
def test_any_traffic_is_the_plain_loop(setting: Setting) -> None:
    Traffic(setting).run()


def test_the_drafts_of_these_tests_are_often_right_and_often_wrong() -> None:
    runs = [Traffic(Setting(seed=seed, requests=6)) for seed in range(20)]
    for run in runs:
        run.run()
    drafted, accepted = sum(r.drafted for r in runs), sum(r.accepted for r in runs)
    assert drafted > 400
    assert 0.1 < accepted / drafted < 0.9
