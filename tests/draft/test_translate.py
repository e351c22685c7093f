"""A draft model in other ids: how texts are carried over, the law on shared ids, and that texts stay the same."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, processors, trainers
from transformers import PreTrainedTokenizerFast

import sooner
from sooner.config import Budget, EngineConfig
from sooner.control.fixed import FixedController
from sooner.core.law import LawParams
from sooner.draft.model import ModelDrafter
from sooner.draft.protocol import Context
from sooner.draft.translate import Foreign, Spelling, TranslatingDrafter, Words, shared_ids
from sooner.engine.engine import Engine
from sooner.params import SamplingParams
from sooner.testing import ToyModel, check_drafter
from tests.draft.tables import Table
from tests.engine.plain import plain_text
from tests.tiny import make_tiny, tiny_tokenizer

LETTERS = "abcdefgh"
GREEDY, WARM = LawParams(), LawParams(temperature=1.0)


def words(spelled: Sequence[str], ends: Sequence[int] = ()) -> Words:
    """A tokenizer that always takes the longest word it has; ids with no spelling are special."""
    longest = max(map(len, spelled))

    def encode(text: str, *, special: bool) -> list[int]:
        ids, at = [], 0
        while at < len(text):
            size = next(n for n in range(longest, 0, -1) if text[at : at + n] in spelled)
            ids.append(spelled.index(text[at : at + size]))
            at += size
        return ids

    return Words([w.encode() for w in spelled], encode, lambda ids: "".join(spelled[i] for i in ids), ends)


SINGLE = words(LETTERS)
PAIRS = words([LETTERS[i : i + 2] for i in range(0, 8, 2)] + list(LETTERS))


def cycle(own: Words, step: int, sure: float = 9.0) -> Table:
    """A model that writes abcdefgh again and again in its own ids, `step` letters at a time where it can."""
    table = torch.zeros(len(own.spelled), len(own.spelled))
    for i, word in enumerate(own.spelled):
        after = (LETTERS.index(word.decode()[-1]) + 1) % 8
        wanted = (LETTERS * 2)[after : after + step].encode()
        table[i, list(own.spelled).index(wanted if wanted in own.spelled else wanted[:1])] = sure
    return Table(table)


def context(tokens: Sequence[int], law: LawParams = GREEDY, rule: str = "match", name: str = "r") -> Context:
    return Context(name, list(tokens), law, 7, rule)  # type: ignore[arg-type]  # a literal


def run(engine: Engine) -> None:
    while engine.busy:
        engine.step()
        engine.check()
    assert engine.guard.failures == {}


@pytest.mark.parametrize(
    ("target", "own", "steps"), [(PAIRS, SINGLE, (2, 1)), (SINGLE, PAIRS, (1, 2)), (SINGLE, SINGLE, (1, 1))]
)
def test_a_draft_in_other_ids_is_right_where_its_text_is(
    target: Words, own: Words, steps: tuple[int, int]
) -> None:
    """One writes letters, the other pairs; both write the same text, so (nearly) all is accepted."""
    model = cycle(target, steps[0])
    drafter = TranslatingDrafter(Foreign(cycle(own, steps[1]), own, target), model.vocab_size, confidence=0.0)
    engine = Engine(model, drafter, FixedController(Budget.chain(4)), config=EngineConfig(4, 64, 16))
    prompts = [target.encode("abcdef", special=False), target.encode("gh", special=False)]
    requests = [engine.add(prompt, SamplingParams(max_tokens=40)) for prompt in prompts]
    run(engine)
    for request, start in zip(requests, ("abcdef", "gh"), strict=True):
        text = target.decode(request.tokens)
        assert text == (LETTERS * 20)[LETTERS.index(start[0]) :][: len(text)]
        record = request.tally.close()
        assert record.accepted >= 0.9 * record.drafted > 0
        assert 40 / record.steps >= 4, "as many of its ids are drawn as make four of the target's"


def test_shared_ids_spell_the_same_and_none_comes_twice() -> None:
    target = words(["x", "a", "b", "", "ab", "a", "c"], ends=[3])
    own = words(["b", "ab", "zz", "a", "", "b"], ends=[4])
    assert shared_ids(target, own, 7, 6) == ([1, 2, 3, 4], [3, 0, 4, 1])
    assert shared_ids(target, own, 4, 3) == ([2], [0]), "ids beyond the logits are not shared"


@pytest.mark.parametrize("rule", ["reject", "block", "traversal"])
def test_what_is_handed_over_is_the_drafts_law_on_the_shared_ids(rule: str) -> None:
    table = torch.randn(
        len(PAIRS.spelled), len(PAIRS.spelled), generator=torch.Generator().manual_seed(3)
    ).double()
    drafter = TranslatingDrafter(Foreign(Table(table), PAIRS, SINGLE), 8, confidence=0.0)
    [draft] = drafter.propose([context([0, 1], WARM, rule)], [Budget.chain(3)])
    assert draft.probs is not None
    assert len(draft) == 3
    own = [PAIRS.spelled.index(b"ab")] + [PAIRS.spelled.index(LETTERS[t].encode()) for t in draft.tokens]
    for row, before in zip(draft.probs, own, strict=False):
        expected = table[before].softmax(-1)[[PAIRS.spelled.index(letter.encode()) for letter in LETTERS]]
        assert torch.allclose(row, expected / expected.sum(), atol=1e-12)


@pytest.mark.parametrize("asked", [{"rule": "reject"}, {"rule": "traversal"}, {"seed": None}], ids=str)
def test_sampled_texts_follow_the_targets_law(asked: dict[str, Any]) -> None:
    """Half of the target's ids are unknown to the draft; chi-square over all texts of two tokens."""
    target = words(["a", "b", "ab", "ba", "c", "d"])
    own = words(["d", "c", "b", "a", "cd", "dc"])
    g = torch.Generator().manual_seed(1)
    table = 1.5 * torch.randn(6, 6, generator=g).double()
    draft_table = 1.5 * torch.randn(6, 6, generator=g).double()
    drafter = TranslatingDrafter(Foreign(Table(draft_table), own, target), 6, confidence=0.0)
    engine = Engine(Table(table), drafter, FixedController(Budget.chain(2)), config=EngineConfig(64, 512, 64))
    count = 4000
    requests = [
        engine.add([0], SamplingParams(max_tokens=3, temperature=1.0, **(asked if asked.get("rule") else {})))
        for _ in range(count)
    ]
    run(engine)
    p = table.softmax(-1)
    chi, bins = 0.0, 0
    for first, second in itertools.product(range(6), repeat=2):
        expected = float(p[0, first] * p[first, second]) * count
        if expected >= 5:
            seen = sum(tuple(r.tokens[1:3]) == (first, second) for r in requests)
            chi, bins = chi + (seen - expected) ** 2 / expected, bins + 1
    assert bins > 15
    assert chi < bins + 6 * (2 * bins) ** 0.5
    assert 0 < sum(r.tally.close().accepted for r in requests) < sum(r.tally.close().drafted for r in requests)


def test_under_match_shared_ids_are_drawn_with_the_targets_noise() -> None:
    """A draft that knows the target's law, in other ids, guesses what the target will draw."""
    order = [3, 0, 2, 1, 7, 6, 5, 4]
    own = words([LETTERS[i] for i in order])
    g = torch.Generator().manual_seed(1)
    table = torch.randn(8, 8, generator=g).double()
    mirrored = Table(table[order][:, order])
    drafter = TranslatingDrafter(Foreign(mirrored, own, SINGLE), 8, confidence=0.0)
    engine = Engine(Table(table), drafter, FixedController(Budget.chain(4)))
    request = engine.add([0, 1], SamplingParams(max_tokens=50, temperature=1.0, seed=5))
    run(engine)
    record = request.tally.close()
    assert record.accepted == record.drafted > 0
    assert record.steps == 10


def test_a_character_that_is_not_whole_is_not_translated() -> None:
    broken = Words([b"a", b"\xc3", b"\xa9"], SINGLE.encode, lambda ids: "\ufffd" if ids[-1] == 1 else "a")
    drafter = TranslatingDrafter(Foreign(cycle(SINGLE, 1), SINGLE, broken), 3)
    assert [len(d) for d in drafter.propose([context([0, 1])], [Budget.chain(3)])] == [0]


def test_it_keeps_the_protocol_and_gives_lanes_back() -> None:
    made: list[TranslatingDrafter] = []

    def make() -> TranslatingDrafter:
        made.append(TranslatingDrafter(Foreign(ToyModel(12), PAIRS, SINGLE), 8))
        return made[-1]

    check_drafter(make, 8, steps=30)
    assert all(drafter.model.lanes.in_use == 0 for drafter in made)


def other_tokenizer(kind: str) -> Any:
    """Tokenizers that split the same text otherwise: other merges, or SentencePiece's way with a BOS."""
    text = [
        "a target that writes the same text over and over, and a draft that guesses it. libraries open at nine."
    ]
    if kind == "bytes":
        inner = Tokenizer(models.BPE())
        base = tiny_tokenizer().backend_tokenizer
        inner.pre_tokenizer, inner.decoder = base.pre_tokenizer, base.decoder
        alphabet = sorted(t for t in base.get_vocab() if len(t) == 1)
        inner.train_from_iterator(
            text, trainers.BpeTrainer(vocab_size=310, initial_alphabet=alphabet, show_progress=False)
        )
        return PreTrainedTokenizerFast(tokenizer_object=inner)
    inner = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    bytes_ = [f"<0x{i:02X}>" for i in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=310, special_tokens=["<unk>", "<s>", *bytes_], show_progress=False)
    inner.train_from_iterator(["▁" + t.replace(" ", "▁") for t in text], trainer)
    state = json.loads(inner.to_str())
    state["added_tokens"] = state["added_tokens"][:2]  # bytes are no special tokens
    inner = Tokenizer.from_str(json.dumps(state))
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", unk_token="<unk>")


def spelling_words(tokenizer: Any) -> Words:
    def encode(text: str, *, special: bool) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=special)["input_ids"]
        return ids

    return Words((), encode, lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=True)))


BYTES, PIECES = spelling_words(other_tokenizer("bytes")), spelling_words(other_tokenizer("pieces"))
TEXT = "the same text, sooner. " * 40 + "naïve café - ünïcode\n\n  and   spaces"


@pytest.mark.parametrize("tokenizer", [BYTES, PIECES], ids=["bytes", "pieces"])
@settings(max_examples=40, deadline=None, derandomize=True)
@given(steps=st.lists(st.integers(1, 300), max_size=8))
def test_a_growing_text_is_spelled_as_a_whole_one(tokenizer: Words, steps: list[int]) -> None:
    spelling, length = Spelling(tokenizer), 1
    for step in [*steps, len(TEXT)]:
        length = min(length + step, len(TEXT))
        assert spelling.of(TEXT[:length]) == tokenizer.encode(TEXT[:length], special=True)
    assert spelling.of("another text") == tokenizer.encode("another text", special=True)


def test_the_beginning_of_a_long_text_is_spelled_once_where_that_is_safe() -> None:
    calls: list[int] = []

    def encode(text: str, *, special: bool) -> Sequence[int]:
        calls.append(len(text))
        return BYTES.encode(text, special=special)

    spelling = Spelling(Words((), encode, BYTES.decode))
    spelling.of(TEXT * 4)
    calls.clear()
    spelling.of(TEXT * 4 + " more")
    assert max(calls) < 600
    pieces = Spelling(PIECES)
    pieces.of(TEXT)
    assert not pieces.splits, "a space is put before every piece of the text"


@pytest.mark.parametrize("kind", ["bytes", "pieces"])
@pytest.mark.parametrize(
    "asked",
    [
        SamplingParams(max_tokens=40),
        SamplingParams(max_tokens=40, temperature=0.8, seed=3),
        SamplingParams(max_tokens=40, repetition_penalty=1.3, temperature=0.5, top_k=9, seed=4),
    ],
    ids=["greedy", "seed", "penalty"],
)
def test_48_texts_with_a_draft_of_another_tokenizer_are_the_plain_ones(
    foreign: dict[str, Path], tiny: Path, kind: str, asked: SamplingParams
) -> None:
    """A batch; non-ASCII; prompts that are longer and shorter in the draft's ids."""
    prompts = ["once upon a time there was", "naïve café - ünïcode 東京", "x", "libraries open at nine. " * 6]
    plain = sooner.LLM(str(tiny), draft="none", dtype="float32").generate(prompts, asked)
    llm = sooner.LLM(str(tiny), draft=f"model:{foreign[kind]}", dtype="float32", k=4)
    made = llm.generate(prompts, asked)
    assert [one.token_ids for one in made] == [one.token_ids for one in plain]
    assert llm.engine.guard.failures == {}
    assert sum(one.stats.drafted for one in made) > 0
    drafter = llm.engine.guard.drafter
    assert isinstance(drafter, TranslatingDrafter)
    assert drafter.model.lanes.in_use == 0


def test_47_the_same_tokenizer_with_padding_is_not_translated(tiny: Path, foreign: dict[str, Path]) -> None:
    drafter = sooner.LLM(str(tiny), draft=f"model:{foreign['padded']}", dtype="float32").engine.guard.drafter
    assert isinstance(drafter, ModelDrafter)


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny models with other tokenizers, and one whose ids only go further."""
    folders = {}
    for kind in ("bytes", "pieces"):
        folders[kind] = make_tiny(tmp_path_factory.mktemp("foreign") / kind, seed=5, vocab=320)
        for file in folders[kind].glob("tokenizer*"):
            file.unlink()
        other_tokenizer(kind).save_pretrained(folders[kind])
    folders["padded"] = make_tiny(tmp_path_factory.mktemp("foreign") / "padded", seed=5, vocab=384)
    return folders


def test_texts_on_a_toy_target_are_those_of_plain_decoding() -> None:
    asked = SamplingParams(max_tokens=60, temperature=0.7, seed=2)
    drafter = TranslatingDrafter(Foreign(ToyModel(12), PAIRS, SINGLE), 8, confidence=0.0)
    engine = Engine(ToyModel(8), drafter, FixedController(Budget.chain(3)), config=EngineConfig(3, 64, 16))
    prompts = [[0, 1, 2], [3], [4, 5, 6, 7, 0, 1]]
    requests = [engine.add(prompt, asked) for prompt in prompts]
    run(engine)
    for prompt, request in zip(prompts, requests, strict=True):
        assert request.tokens[len(prompt) :] == plain_text(ToyModel(8).next_logits, prompt, asked)[0]
