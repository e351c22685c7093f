"""The devices the bug cases use: plain texts, engines, and drafters that are right, wrong or right for a while."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tokenizers import Tokenizer, decoders, models

from sooner.config import Budget, EngineConfig
from sooner.control.fixed import FixedController
from sooner.core.tree import Draft, chain
from sooner.draft.lookup import LookupDrafter
from sooner.draft.model import ModelDrafter
from sooner.draft.none import NoDrafter
from sooner.draft.protocol import Context, Drafter
from sooner.engine.detokenize import StreamDetokenizer
from sooner.engine.engine import Engine, Event
from sooner.engine.request import Request
from sooner.params import SamplingParams
from sooner.testing import ScriptedDrafter, ToyModel, oracle
from tests.engine.plain import plain_text

VOCAB = 500  # so many ids that the tokens of a short text are all different
PROMPT = [3, 14, 15, 92, 65]


def greedy(model: ToyModel, prompt: Sequence[int], count: int) -> list[int]:
    """G: the first tokens of plain greedy decoding."""
    return plain_text(model.next_logits, prompt, SamplingParams(max_tokens=count))[0]


def engine(drafter: Drafter | None = None, model: ToyModel | None = None, *, k: int = 4, **options: Any) -> Engine:
    """Serves a ToyModel of VOCAB ids with chains of k, plain by default."""
    options.setdefault("config", EngineConfig(8, 256, 16))
    return Engine(model or ToyModel(VOCAB), drafter or NoDrafter(), FixedController(Budget.chain(k)), **options)


def run(one: Engine, *requests: Request) -> list[Event]:
    """Step until the requests (or all there are) have ended; invariants hold after every step."""
    events = []
    while one.busy and not (requests and all(r.finish for r in requests)):
        events += one.step()
        one.check()
    return events


def text(request: Request) -> list[int]:
    return request.tokens[len(request.prompt) :]


def generate(
    drafter: Drafter | None,
    prompt: Sequence[int],
    params: SamplingParams,
    model: ToyModel | None = None,
    **options: Any,
) -> Request:
    """One request, alone in its engine, to its end. What its events said is what it holds."""
    one = engine(drafter, model, **options)
    request = one.add(prompt, params)
    events = run(one)
    assert [token for event in events for token in event.tokens] == text(request)
    assert [event.finish is None for event in events] == [True] * (len(events) - 1) + [False]
    assert one.model.lanes.in_use == 0
    return request


def self_draft(vocab: int = VOCAB, **options: Any) -> ModelDrafter:
    """D = T: everything is accepted."""
    return ModelDrafter(ToyModel(vocab, **options), vocab, confidence=0.0)


def anti(whole: Sequence[int], vocab: int = VOCAB) -> ScriptedDrafter:
    """Never right: everything is rejected."""
    return oracle(whole, right=0, vocab=vocab)


def now_and_then(whole: Sequence[int], silent: Callable[[int], bool]) -> ScriptedDrafter:
    """An oracle that has nothing to say in the rounds for which `silent` is true."""
    rounds = iter(range(10**6))

    def script(context: Context, budget: Budget) -> Draft:
        start = len(context.tokens)
        return Draft() if silent(next(rounds)) else chain(whole[start : start + budget.depth])

    return ScriptedDrafter(script)


def drafters(whole: Sequence[int], vocab: int = VOCAB) -> dict[str, Callable[[], Drafter]]:
    """Every kind of drafter for a text that is known."""
    return {
        "none": NoDrafter,
        "lookup": LookupDrafter,
        "self": lambda: self_draft(vocab),
        "oracle": lambda: oracle(whole),
        "oracle(1)": lambda: oracle(whole, right=1, vocab=vocab),
        "oracle(2)": lambda: oracle(whole, right=2, vocab=vocab),
        "anti": lambda: anti(whole, vocab),
    }


KINDS = list(drafters([]))


def letters(vocab: int) -> Tokenizer:
    """A tokenizer whose token i is written "<i>": every text tells its tokens."""
    names = {f"<{i}>": i for i in range(vocab)}
    tokenizer = Tokenizer(models.WordLevel(names, unk_token="<0>"))
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def with_text(tokenizer: Tokenizer) -> dict[str, Any]:
    """Engine options for texts."""
    return {"detokenizer": lambda prompt, skip: StreamDetokenizer(tokenizer, prompt, skip)}


def cut_plainly(
    tokenizer: Tokenizer, prompt: Sequence[int], tokens: Sequence[int], stops: Sequence[str]
) -> tuple[str, int]:
    """Text before the first stop string and the tokens written for it, decoding everything after every token."""
    before = len(tokenizer.decode(list(prompt)))
    for count in range(1, len(tokens) + 1):
        written = tokenizer.decode([*prompt, *tokens[:count]])[before:]
        found = [written.index(stop) for stop in stops if stop in written]
        if found:
            return written[: min(found)], count
    return tokenizer.decode([*prompt, *tokens])[before:], len(tokens)
