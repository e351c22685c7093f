"""Masks along a tree are those of every path read anew; the state is a function of the text alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

import pytest
import torch
from torch import Tensor

from sooner.config import Budget
from sooner.core.tree import EMPTY, Draft, chain
from sooner.engine.grammar import GrammarCompiler
from sooner.engine.grammar_constraint import GrammarConstraint, GrammarError, check_sound, has, pack, unpack
from sooner.engine.grammar_vocab import Vocabulary
from sooner.engine.judge import paths
from sooner.params import SamplingParams
from sooner.structured import StructuredOutputs
from sooner.testing import ToyModel
from tests.engine.grammars import BACKENDS, CASES, EOS, NAMES, SPECIAL, WIDTH, after, constrained_text, pieces
from tests.engine.wild import random_tree
from tests.tiny import VOCAB, tiny_tokenizer


@pytest.fixture(scope="module", params=[(), (EOS,), (EOS, 5)], ids=["no end", "one end", "two ends"])
def compiler(request: pytest.FixtureRequest) -> Iterator[GrammarCompiler]:
    one = GrammarCompiler(pieces(), WIDTH, request.param, seconds=60)
    yield one
    one.close()


def anew(compiler: GrammarCompiler, wanted: StructuredOutputs, text: Sequence[int], path: Sequence[int]) -> Tensor:
    """The mask after a path, by a fresh constraint; all true where the text cannot get or has ended."""
    constraint = after(compiler, wanted, text)
    for token in path:
        if constraint.ended or not constraint.masks(EMPTY)[0, token]:
            return torch.ones(WIDTH, dtype=torch.bool)
        constraint.advance([token])
    return torch.ones(WIDTH, dtype=torch.bool) if constraint.ended else constraint.masks(EMPTY)[0]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_masks_along_a_tree_are_those_of_every_path_read_anew(
    compiler: GrammarCompiler, backend: str, case: str
) -> None:
    random = Random(0)
    wanted = CASES[case].by(backend)
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=3, logit_bias=CASES[case].bias)
    ends = compiler.vocabulary().ends
    text, _ = constrained_text(compiler, wanted, ToyModel(WIDTH).next_logits, [2], params, ends)
    kinds = set()
    for at in range(min(len(text), 12)):
        constraint = after(compiler, wanted, text[:at])
        before = constraint.masks(EMPTY)
        drafts = [random_tree(random, WIDTH, Budget(5, 4, 14), [*text[at:], EOS, 5, SPECIAL]) for _ in range(4)]
        for draft in [*drafts, chain([*text[at:], EOS, *text[:2], WIDTH - 1])]:
            masks = constraint.masks(draft)
            assert masks.dtype == torch.bool
            assert masks.shape == (1 + len(draft), WIDTH)
            for row, path in zip(masks, paths(draft), strict=True):
                assert torch.equal(row, anew(compiler, wanted, text[:at], path)), (at, path)
                kinds.add((len(path) > 1, bool(row.all())))
            assert torch.equal(constraint.masks(EMPTY), before), "the state has moved"
    assert kinds == {(False, False), (False, True), (True, False), (True, True)} or case == "choice"


@pytest.mark.parametrize("backend", BACKENDS)
def test_ids_that_spell_nothing_are_never_allowed(compiler: GrammarCompiler, backend: str) -> None:
    """Special tokens, and ids of the logits that the tokenizer does not have."""
    anything = compiler.compile(StructuredOutputs(regex="[^c]*", backend=backend))
    mask = anything.masks(EMPTY)[0]
    never = {SPECIAL, EOS, WIDTH - 1, WIDTH - 2, NAMES.index("c")} - set(compiler.vocabulary().ends)
    ends = set(compiler.vocabulary().ends)
    assert {i for i in range(WIDTH) if not mask[i]} == never | ({5} - ends)
    assert all(mask[i] for i in ends), "the empty text fits too"


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_after_the_end_is_read(compiler: GrammarCompiler, backend: str) -> None:
    wanted = StructuredOutputs(choice=("ab",), backend=backend)
    constraint = compiler.compile(wanted)
    constraint.advance([NAMES.index("ab"), EOS, SPECIAL, 3, WIDTH - 1])
    assert constraint.ended
    constraint.advance([3])
    assert constraint.ended
    assert constraint.forced(8) == ()
    assert bool(constraint.masks(chain([3, EOS])).all()), "no law may be without mass there"


@pytest.mark.parametrize("backend", BACKENDS)
def test_forced_tokens_spell_what_must_follow_and_respect_the_limit(backend: str) -> None:
    """With a tokenizer of bytes and merges, and under one that encodes to something else."""
    tokenizer = tiny_tokenizer().backend_tokenizer
    compiler = GrammarCompiler(tokenizer, VOCAB, (0,), seconds=60)
    constraint = compiler.compile(StructuredOutputs(regex="once upon a time there was (a|b)", backend=backend))
    forced = constraint.forced(100)
    assert "once upon a time there was ".startswith(tokenizer.decode(list(forced)))
    assert len(forced) > 3
    assert forced[:-1] == tuple(tokenizer.encode("once upon a time there was a").ids[: len(forced) - 1])
    for limit in range(4):
        assert constraint.forced(limit) == forced[:limit]
    strange = GrammarCompiler(pieces(), WIDTH, ())  # encode() knows whole words only
    ids = strange.compile(StructuredOutputs(choice=("((abc", "((ab0"), backend=backend)).forced(100)
    assert "((ab".startswith("".join(NAMES[i] for i in ids))
    assert ids
    compiler.close()


class Stubborn:
    """A matcher whose mask allows what it refuses, as a library does that has run into a limit."""

    complete = False

    def accept(self, token: int) -> bool:
        return False

    def bits(self, draft: Draft) -> Tensor:
        return torch.full((1 + len(draft), 1), -1, dtype=torch.int32)

    def forced(self) -> Sequence[int]:
        return [0, 1]


def test_a_library_at_its_limit_leaves_no_law_and_no_wrong_text() -> None:
    constraint = GrammarConstraint(Stubborn(), Vocabulary((b"a", b"b", b""), ()))
    assert constraint.masks(EMPTY).tolist() == [[True, True, False]]
    assert constraint.forced(5) == (0, 1)
    constraint.advance([0])
    assert not constraint.ended
    assert constraint.masks(chain([1])).tolist() == [[False] * 3, [True] * 3]
    assert constraint.forced(5) == ()


class Once(Stubborn):
    """One token completes it; it minds being asked for more."""

    def __init__(self) -> None:
        self.accepted: list[int] = []

    @property
    def complete(self) -> bool:  # type: ignore[override]  # a class attribute there
        return bool(self.accepted)

    def accept(self, token: int) -> bool:
        self.accepted.append(token)
        return True

    def bits(self, draft: Draft) -> Tensor:
        return pack([3] if self.accepted else [0, 1], 4).repeat(1 + len(draft), 1)


@pytest.mark.parametrize("run", [[0, 1, 1], [0, 2, 1], [0, 0], [1, 2, 2, 0]])
def test_a_matcher_is_never_advanced_after_the_end(run: list[int]) -> None:
    matcher = Once()
    constraint = GrammarConstraint(matcher, Vocabulary((b"a", b"b", b""), (2,)))
    constraint.advance(run)
    assert constraint.ended
    constraint.advance([0])
    assert matcher.accepted == run[:1]
    other = Once()
    constraint = GrammarConstraint(other, Vocabulary((b"a", b"b", b""), (2,)))
    constraint.advance([2, 0, 1])
    assert constraint.ended
    assert other.accepted == [], "an end-of-text id is not for the matcher"


class Dead:
    """A grammar that nothing fits, or only the empty text."""

    size = 0

    def __init__(self, complete: bool) -> None:
        self.complete = complete

    def matcher(self) -> Dead:
        return self

    def accept(self, token: int) -> bool:
        return False

    def bits(self, draft: Draft) -> Tensor:
        return pack([3] if self.complete else [], 4)[None]

    def forced(self) -> Sequence[int]:
        return ()


@pytest.mark.parametrize(("complete", "named"), [(True, "only the empty text"), (False, "no text")])
def test_a_grammar_that_nothing_fits_is_refused_at_once(complete: bool, named: str) -> None:
    with pytest.raises(GrammarError, match=named):
        check_sound(Dead(complete), Vocabulary((b"a", b"b", b""), ()))


def test_packed_masks_are_read_as_they_were_written() -> None:
    random = Random(2)
    for count in (1, 31, 32, 33, 64, 100):
        ids = sorted(random.sample(range(count), random.randint(1, count)))
        words = pack(ids, count)[None]
        assert words.dtype == torch.int32
        assert [i for i in range(count) if unpack(words, count)[0, i]] == ids
        assert [i for i in range(count) if has(words, 0, i)] == ids
