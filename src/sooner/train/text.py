"""A target writes the text that is learned from: user turns, documents, answers. Knows no table and no head.

Conversation number i is a function of (model, seed, i), up to rounding, so writing can stop anywhere and go on;
what is lost is what the last shard did not hold yet, less than a minute's work.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sooner.config import Budget, EngineConfig
from sooner.core.tree import EMPTY, Draft
from sooner.draft.protocol import Context, Outcome, Tops
from sooner.errors import ConfigError, RequestError
from sooner.llm import LLM, Message
from sooner.params import SamplingParams
from sooner.train import shards
from sooner.train.shards import Text
from sooner.train.styles import TOPICS, Style, pick

TOPS = 8  # likeliest ids kept of every row
AT_ONCE = 32  # conversations written side by side
SHARD = 8192  # written tokens in a shard
_LIVELY, _NUCLEUS = 0.8, 0.9  # temperature and top-p of what a user says; above that a small target rambles
_SAMPLED = 8  # every so many-th answer is sampled at temperature 1, the others are greedy
_TURNS = 3  # most turns of a user in a conversation with follow-ups
_BARREN = 1000  # conversations that come to nothing before giving up
_MARK = "\u2063"  # stands for what the model is to write, while the template is rendered

Progress = Callable[[int, int], None]
"""Told how many tokens are written, and how many of them in this run."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One text wanted from the model."""

    prompt: list[int]
    params: SamplingParams
    kind: str


Conversation = Generator[Ask, list[int], None]


class Recorder:
    """A drafter that guesses nothing and keeps the likeliest ids of every row."""

    name = "none"
    taps: tuple[int, ...] = ()
    tops = TOPS

    def __init__(self) -> None:
        self.rows: dict[str, list[tuple[tuple[int, ...], tuple[float, ...]]]] = {}

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        return [EMPTY] * len(contexts)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            if outcome.tops is not None:
                self.rows.setdefault(outcome.request_id, []).append((outcome.tops.ids[0], outcome.tops.logits[0]))

    def forget(self, request_id: str) -> None:
        """What was recorded is taken when the text is done."""

    def take(self, request_id: str) -> Tops:
        """The rows of a text that is done."""
        rows = self.rows.pop(request_id, [])
        return Tops(tuple(ids for ids, _ in rows), tuple(logits for _, logits in rows))


def write(llm: LLM, recorder: Recorder, folder: Path, wanted: int, *, seed: int, progress: Progress) -> int:
    """Write until the shards of `folder` hold `wanted` tokens or more; returns how many they hold.

    llm: a target whose drafter is `recorder`. Goes on from the shards that are there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    known = shards.paths(folder)
    held = sum(shards.written(path) for path in known)
    number = int(known[-1].stem.split("-")[1]) + 1 if known else 0
    if held >= wanted:
        progress(held, 0)
        return held
    start = max((shards.following(path) for path in known), default=0)
    fresh = 0
    kept: list[Text] = []
    for begun, text in _texts(llm, recorder, seed, start):
        kept.append(text)
        fresh += text.written
        progress(held + fresh, fresh)
        size = sum(text.written for text in kept)
        if size >= SHARD or held + fresh >= wanted:
            shards.save(folder, number, kept, begun)
            number, kept = number + 1, []
        if held + fresh >= wanted:
            break
    return held + fresh


def engine_config() -> EngineConfig:
    """Limits of an engine that writes AT_ONCE texts side by side."""
    return EngineConfig(max_requests=AT_ONCE)


def _texts(llm: LLM, recorder: Recorder, seed: int, start: int) -> Iterator[tuple[int, Text]]:
    """Texts as they are finished, each with the number of conversations begun so far."""
    engine, begun = llm.engine, start
    seen: set[tuple[int, ...]] = set()  # a question asked twice teaches nothing new
    running: dict[str, tuple[Conversation, Ask]] = {}

    def go_on(conversation: Conversation, said: list[int] | None) -> None:
        try:
            ask = next(conversation) if said is None else conversation.send(said)
            running[engine.add(ask.prompt, ask.params).id] = (conversation, ask)
        except (StopIteration, RequestError):  # it is over, or has outgrown the model's context
            return

    while True:
        while len(running) < AT_ONCE:
            go_on(_conversation(llm, seed, begun, seen), None)
            begun += 1
            if not running and begun - start > _BARREN:
                raise ConfigError(f"{llm.target.name} has no room for conversations: its context is too short.")
        for event in engine.step():
            if event.finish is None:
                continue
            done, (conversation, ask) = event.request, running.pop(event.request.id)
            tops, said = recorder.take(done.id), done.tokens[len(done.prompt) :]
            if said and len(said) == len(tops.ids):
                yield begun, Text(tuple(done.tokens), len(done.prompt), ask.kind, tops)
                go_on(conversation, said)


def _conversation(llm: LLM, seed: int, number: int, seen: set[tuple[int, ...]]) -> Conversation:
    """The texts of one conversation, one after another."""
    dice = random.Random(f"{seed}/{number}")
    style, opening, topic = pick(dice)
    document = yield from _document(llm, style, topic, dice)
    turn = opening.replace("{topic}", topic).replace("{document}", document)
    said: list[Message] = []
    for follow_up in ("", *dice.sample(style.follow_ups, min(dice.randint(1, _TURNS - 1), len(style.follow_ups)))):
        turn = follow_up or turn
        if style.turn:
            # Long ones are begun as the answer's prompt will be, so its lane holds all but the last few rows.
            begun = _begun_turn(llm, "" if said or document else style.system, said, turn)
            turn += _plain(llm, (yield Ask(begun, _lively(dice, style.turn), "turn")))
        said.append({"role": "user", "content": turn.strip()})
        prompt = llm.encode_chat(said)
        if tuple(prompt) in seen:
            return
        seen.add(tuple(prompt))
        answer = _plain(llm, (yield Ask(prompt, _answering(dice, style), "answer")))
        said.append({"role": "assistant", "content": answer})


def _document(llm: LLM, style: Style, topic: str, dice: random.Random) -> Generator[Ask, list[int], str]:
    """What the user of a style pastes, "" where it is nothing."""
    passages = []
    others = dice.sample(TOPICS, style.passages) if style.document else []
    for about in (topic, *others)[: len(others)]:
        prompt = llm.encode_chat(style.document.format(topic=about))
        said = yield Ask(prompt, _lively(dice, dice.randint(*style.size)), "document")
        passages.append(_plain(llm, said).strip())
    dice.shuffle(passages)
    return "\n\n".join(passages)


def _answering(dice: random.Random, style: Style) -> SamplingParams:
    if dice.randrange(_SAMPLED):
        return SamplingParams(max_tokens=style.answer)
    return SamplingParams(max_tokens=style.answer, temperature=1.0, seed=dice.getrandbits(32))


def _lively(dice: random.Random, most: int) -> SamplingParams:
    return SamplingParams(max_tokens=most, seed=dice.getrandbits(32), temperature=_LIVELY, top_p=_NUCLEUS)


def _plain(llm: LLM, tokens: Sequence[int]) -> str:
    text: str = llm.target.tokenizer.decode(list(tokens), skip_special_tokens=True)
    return text


def _begun_turn(llm: LLM, system: str, said: Sequence[Message], begun: str) -> list[int]:
    """The chat template up to the middle of a user's turn. said: the turns before it;
    system "": the one the template has of its own."""
    template = getattr(llm.target.tokenizer, "chat_template", None)
    if not template:
        raise ConfigError(
            f"{llm.target.name} has no chat template, so it cannot write the turns of a user itself."
        )
    turns = [{"role": "system", "content": system}, *said, {"role": "user", "content": begun + _MARK}]
    render = llm.target.tokenizer.apply_chat_template
    try:
        text = render(turns if system else turns[1:], tokenize=False)
    except Exception:  # templates are programs; many refuse a system turn
        text = render(turns[1:], tokenize=False)
    return llm.target.encode(str(text).split(_MARK)[0], special=False)
