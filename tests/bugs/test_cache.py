"""Bug reports on caches that fall out of step with the text (F of the collection, and 45)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

import sooner
from sooner.config import Budget
from sooner.core.tree import Draft
from sooner.draft.lookup import LookupDrafter
from sooner.draft.model import ModelDrafter
from sooner.draft.protocol import Context, Drafter
from sooner.params import SamplingParams
from sooner.testing import ToyModel, oracle
from tests.bugs.harness import (
    KINDS,
    PROMPT,
    VOCAB,
    anti,
    drafters,
    engine,
    generate,
    greedy,
    now_and_then,
    run,
    self_draft,
    text,
)

G = greedy(ToyModel(VOCAB), PROMPT, 300)
WHOLE = [*PROMPT, *G]
FORTY = SamplingParams(max_tokens=40)


class Spoiled(ModelDrafter):
    """A self draft, some of whose tokens are replaced on their way out: `spoil(round, node)`."""

    def __init__(self, spoil: Callable[[int, int], bool]) -> None:
        super().__init__(ToyModel(VOCAB), VOCAB, confidence=0.0)
        self._spoil, self._round = spoil, 0

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        self._round += 1
        return [self._changed(draft) for draft in super().propose(contexts, budgets)]

    def _changed(self, draft: Draft) -> Draft:
        tokens = tuple(
            (token + 1) % VOCAB if self._spoil(self._round, node) else token
            for node, token in enumerate(draft.tokens)
        )
        return replace(draft, tokens=tokens)


@pytest.mark.parametrize("k", [1, 2, 5])
def test_32_the_draft_cache_lacks_one_token_after_full_acceptance(k: int) -> None:
    request = generate(self_draft(), PROMPT, SamplingParams(max_tokens=200), k=k)
    record = request.tally.close()
    assert text(request) == G[:200]
    assert record.accepted == record.drafted, "every round accepts k of k to the end"
    assert record.steps == -(-200 // (k + 1))


@pytest.mark.parametrize("k", [1, 2, 5])
def test_32_full_acceptance_and_rejection_in_turn(k: int) -> None:
    """Every other round is spoilt from its second token on; the rounds between still accept k of k."""
    one = engine(Spoiled(lambda turn, node: turn % 2 == 0 and node >= 1), k=k)
    request = one.add(PROMPT, SamplingParams(max_tokens=200))
    gains = [len(event.tokens) for event in run(one)]
    assert text(request) == G[:200]
    assert all(gain == (k + 1 if turn % 2 == 0 else min(k + 1, 2)) for turn, gain in enumerate(gains[:-1]))


def test_33_rollback_to_the_wrong_length_after_rejection() -> None:
    """Every fourth proposal is wrong; the three before it stay accepted all the way."""
    one = engine(Spoiled(lambda turn, node: node % 4 == 3), k=8)
    request = one.add(PROMPT, SamplingParams(max_tokens=300))
    gains = [len(event.tokens) for event in run(one)]
    assert text(request) == G
    assert set(gains[:-1]) == {4}, "three accepted and one correction, from the first third to the last"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("token", [0, 7, VOCAB - 1])
def test_34_positions_are_wrong_after_rollback_with_a_prompt_of_one_token(kind: str, token: int) -> None:
    plain = greedy(ToyModel(VOCAB), [token], 40)
    assert text(generate(drafters([token, *plain])[kind](), [token], FORTY, k=4)) == plain


@pytest.mark.parametrize("kind", ["self", "lookup", "oracle", "oracle(2)", "anti"])
def test_34_a_prompt_of_one_token_on_a_model_with_rotary_positions(tiny: Path, kind: str) -> None:
    plain = sooner.LLM(str(tiny), draft="none", dtype="float32").generate([9], FORTY)
    whole = [9, *plain.token_ids]
    made: dict[str, str | Drafter] = {
        "self": f"model:{tiny}",
        "lookup": "lookup",
        "oracle": oracle(whole),
        "oracle(2)": oracle(whole, 2, 320),
        "anti": anti(whole, 320),
    }
    result = sooner.LLM(str(tiny), draft=made[kind], dtype="float32", k=4).generate([9], FORTY)
    assert result.token_ids == plain.token_ids


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", range(1, 13))
def test_40_an_abort_in_the_middle_spoils_what_comes_after(kind: str, count: int) -> None:
    """Closed after every possible number of tokens; then the same prompt, and one with the same beginning."""
    one = engine(drafters(WHOLE)[kind](), k=4)
    first = one.add(PROMPT, FORTY)
    while first.written < count:
        one.step()
    one.abort(first)
    one.check()
    assert one.model.lanes.in_use == 0
    again, longer = one.add(PROMPT, FORTY), one.add(WHOLE[:9], FORTY)
    run(one)
    assert text(again) == G[:40]
    assert text(longer) == greedy(ToyModel(VOCAB), WHOLE[:9], 40)


@pytest.mark.parametrize("draft", ["lookup", "model"])
def test_40_a_stream_closed_early_spoils_no_later_text(tiny: Path, draft: str) -> None:
    llm = sooner.LLM(str(tiny), draft=f"model:{tiny}" if draft == "model" else draft, dtype="float32", k=4)
    plain = sooner.LLM(llm.target, draft="none").generate("the end of the text", FORTY)
    for chunks in range(1, 8):
        stream = llm.stream("the end of the text", FORTY)
        for _ in range(chunks):
            next(stream)
        stream.close()  # type: ignore[attr-defined]  # it is a generator
        assert not llm.engine.busy
        assert llm.generate("the end of the text", FORTY).token_ids == plain.token_ids
    llm.engine.check()


@pytest.mark.parametrize("kind", KINDS)
def test_41_the_second_call_on_the_same_object_is_wrong(kind: str) -> None:
    other = [8, 8, 8]
    plain = greedy(ToyModel(VOCAB), other, 40)
    one = engine(drafters(WHOLE)[kind](), k=4)
    for prompt, expected in [*[(PROMPT, G[:40])] * 5, (other, plain), (PROMPT, G[:40])]:
        request = one.add(prompt, FORTY)
        run(one)
        assert text(request) == expected


@pytest.mark.parametrize("every", [2, 3, 0], ids=["2nd", "3rd", "random"])
@pytest.mark.parametrize("seed", range(3))
def test_45_a_round_without_a_proposal_leaves_a_stale_last_token(every: int, seed: int) -> None:
    random = Random(seed)
    drafter = now_and_then(WHOLE, lambda turn: turn % every == 0 if every else random.random() < 0.5)
    request = generate(drafter, PROMPT, SamplingParams(max_tokens=120), k=4)
    assert text(request) == G[:120]
    assert 0 < request.tally.close().drafted < 4 * 60


def test_45_rounds_with_and_without_a_match_alternate() -> None:
    """A text that repeats itself now and then: lookup has something to say in some rounds only."""
    model = ToyModel(12, order=3)
    plain = greedy(model, [1, 2, 3], 100)
    request = generate(LookupDrafter(3, 2), [1, 2, 3], SamplingParams(max_tokens=100), ToyModel(12, order=3), k=4)
    record = request.tally.close()
    assert text(request) == plain
    assert 0 < record.drafted_by_depth[0] < record.steps
    assert 0 < record.accepted < record.drafted
