"""Bug reports on texts that end inside an accepted block (A of the collection)."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

import sooner
from sooner.core.tree import chain
from sooner.draft.lookup import LookupDrafter
from sooner.params import SamplingParams
from sooner.testing import ScriptedDrafter, ToyModel, oracle
from tests.bugs.harness import (
    KINDS,
    PROMPT,
    VOCAB,
    cut_plainly,
    drafters,
    engine,
    generate,
    greedy,
    letters,
    run,
    self_draft,
    text,
    with_text,
)
from tests.engine.alphabets import byte_fallback, metaspace

K = 5
G = greedy(ToyModel(VOCAB), PROMPT, 40)
WHOLE = [*PROMPT, *G]
LETTERS = letters(VOCAB)


def test_the_text_of_these_cases_repeats_no_token() -> None:
    """So that an end by decree comes at one place only."""
    assert len(set(G[:30])) == 30


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("i", range(2 * K + 1))
def test_01_eos_in_the_middle_of_a_block_is_missed(kind: str, i: int) -> None:
    request = generate(drafters(WHOLE)[kind](), PROMPT, SamplingParams(max_tokens=30), k=K, eos_ids=(G[i],))
    assert (text(request), request.finish) == (G[: i + 1], "stop")


def test_01_the_ending_token_may_be_any_of_a_block() -> None:
    """First draft token, last draft token, correction and bonus: each of them ends some text here."""
    roles = set()
    for right in (None, 0, 1, 3):
        for i in range(2 * K + 1):
            drafter = oracle(WHOLE, right, VOCAB)
            request = generate(drafter, PROMPT, SamplingParams(max_tokens=30), k=K, eos_ids=(G[i],))
            assert (text(request), request.finish) == (G[: i + 1], "stop")
            last = drafter.outcomes[-1]
            if last.drafted == K:
                guessed = last.accepted == len(last.tokens)
                roles.add(
                    f"draft {len(last.tokens)}" if guessed else "bonus" if last.accepted == K else "correction"
                )
    assert {"draft 1", f"draft {K}", "bonus", "correction"} <= roles


def test_01_eos_in_a_block_copied_from_the_prompt() -> None:
    """A text that goes in circles; its prompt holds one whole circle, so lookup proposes the ending token."""
    model = ToyModel(40, order=10**6)
    prompt = [1, *greedy(model, [1], 80)]
    circle = greedy(model, prompt, 80)
    for i in range(2 * K + 1):
        if circle[i] in circle[:i]:
            continue
        request = generate(
            LookupDrafter(),
            prompt,
            SamplingParams(max_tokens=40),
            ToyModel(40, order=10**6),
            k=K,
            eos_ids=(circle[i],),
        )
        assert (text(request), request.finish) == (circle[: i + 1], "stop")
        assert request.tally.close().accepted > 0 or i == 0


@pytest.mark.parametrize("eos", [(G[3], G[7]), (G[7], G[3])])
def test_02_a_list_of_eos_ids_does_not_stop(eos: tuple[int, int]) -> None:
    for drafter in (oracle(WHOLE), LookupDrafter(), self_draft()):
        request = generate(drafter, PROMPT, SamplingParams(max_tokens=30), k=6, eos_ids=eos)
        assert (text(request), request.finish) == (G[:4], "stop")


def test_03_no_eos_at_all_raises_when_an_n_gram_matches() -> None:
    prompt = [11, 4, 9, 2, 30, 4, 9]
    request = generate(LookupDrafter(2), prompt, SamplingParams(max_tokens=20), k=4, eos_ids=())
    assert text(request) == greedy(ToyModel(VOCAB), prompt, 20)
    assert request.tally.close().drafted > 0


@pytest.mark.parametrize("i", [0, 1, 11])
def test_05_a_stop_string_early_in_a_long_block_is_outside_the_checked_tail(i: int) -> None:
    params = SamplingParams(max_tokens=30, stop=(f"<{G[i]}>",))
    request = generate(oracle(WHOLE), PROMPT, params, k=12, **with_text(LETTERS))
    assert (text(request), request.finish) == (G[: i + 1], "stop")
    assert request.writer.text == "".join(f"<{token}>" for token in G[:i])


@pytest.mark.parametrize("kind", KINDS)
def test_07_stop_strings_are_ignored_or_raise_with_a_draft(kind: str) -> None:
    params = SamplingParams(max_tokens=30, stop=(f"<{G[7]}>",))
    request = generate(drafters(WHOLE)[kind](), PROMPT, params, k=K, **with_text(LETTERS))
    assert (text(request), request.finish) == (G[:8], "stop")


def test_07_a_draft_never_ends_the_request_by_itself() -> None:
    """A drafter that proposes the end at once, and again after it: the text goes on until the target ends it."""
    eos = VOCAB - 1
    assert eos not in G
    drafter = ScriptedDrafter(lambda context, budget: chain([eos] * budget.depth))
    request = generate(drafter, PROMPT, SamplingParams(max_tokens=30), eos_ids=(eos,))
    assert (text(request), request.finish) == (G[:30], "length")


@pytest.mark.parametrize("draft", ["lookup", "model"])
def test_07_stop_strings_and_a_draft_on_a_model_with_a_tokenizer(tiny: Path, draft: str) -> None:
    plain = sooner.LLM(str(tiny), draft="none", dtype="float32")
    whole = plain.generate("the same text", SamplingParams(max_tokens=40))
    llm = sooner.LLM(str(tiny), draft=draft if draft == "lookup" else f"model:{tiny}", dtype="float32", k=4)
    for start in range(0, len(whole.text) - 3, 3):
        params = SamplingParams(max_tokens=40, stop=(whole.text[start : start + 3],))
        expected, result = plain.generate("the same text", params), llm.generate("the same text", params)
        assert (result.text, result.token_ids) == (expected.text, expected.token_ids)
        assert result.finish_reason == expected.finish_reason == "stop"
        assert result.text == whole.text[: whole.text.index(params.stop[0])]


@pytest.mark.parametrize("right", [None, 1])
@pytest.mark.parametrize("i", range(2 * K + 1))
def test_08_a_stop_of_several_tokens_split_over_two_rounds_is_missed(i: int, right: int | None) -> None:
    stop = "".join(f"<{token}>" for token in G[i : i + 3])
    request = generate(
        oracle(WHOLE, right, VOCAB), PROMPT, SamplingParams(max_tokens=30, stop=(stop,)), k=K, **with_text(LETTERS)
    )
    assert (text(request), request.finish) == (G[: i + 3], "stop")
    assert request.writer.text == "".join(f"<{token}>" for token in G[:i])


@pytest.mark.parametrize("tokenizer", [metaspace(), byte_fallback()], ids=["unigram", "bpe with bytes"])
@pytest.mark.parametrize("swap", [False, True])
def test_09_the_second_stop_string_is_lost_with_a_tokenizer_that_drops_spaces(
    tokenizer: Tokenizer, swap: bool
) -> None:
    vocab = tokenizer.get_vocab_size()
    words = [tokenizer.token_to_id(word) for word in ("▁a", "▁b", "▁the", "▁end", "s", "▁sto", "p", ".")]
    prompt, params = words[:2], SamplingParams(max_tokens=30, allowed_token_ids=tuple(words))
    options = {"model": ToyModel(vocab), **with_text(tokenizer)}
    plain = generate(None, prompt, params, **options)
    written = text(plain)
    cases = 0
    for i in range(2, 20):
        short = tokenizer.decode([*prompt, *written[: i + 1]])[len(tokenizer.decode([*prompt, *written[:i]])) :]
        stops = ("an end that never comes", short)
        expected, count = cut_plainly(tokenizer, prompt, written, [short])
        for drafter in (oracle([*prompt, *written]), oracle([*prompt, *written], 1, vocab), LookupDrafter()):
            request = generate(
                drafter,
                prompt,
                SamplingParams(max_tokens=30, allowed_token_ids=tuple(words), stop=stops[::-1] if swap else stops),
                k=4,
                **{**options, "model": ToyModel(vocab)},
            )
            assert (request.writer.text, text(request), request.finish) == (expected, written[:count], "stop")
            cases += " " in expected
    assert cases > 10


def test_a_streaming_client_never_receives_a_token_after_the_end() -> None:
    one = engine(oracle(WHOLE), k=12, eos_ids=(G[2],), **with_text(LETTERS))
    one.add(PROMPT, SamplingParams(max_tokens=30))
    events = run(one)
    assert [token for event in events for token in event.tokens] == G[:3]
    shown = "".join(piece.text for event in events for piece in event.pieces)
    assert shown == "".join(f"<{token}>" for token in G[:2])
