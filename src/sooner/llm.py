"""The library's front door: a model, a drafter, and text in, text out. Knows no passes and no tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import overload

from sooner import shipped
from sooner.budgets import TREES, budget_for
from sooner.cache import cache_root
from sooner.config import Budget, EngineConfig, with_kv_memory
from sooner.control.adaptive import AdaptiveController
from sooner.control.cost import Costs
from sooner.control.fixed import FixedController
from sooner.control.protocol import Controller
from sooner.control.store import CostFile
from sooner.draft import registry
from sooner.draft.protocol import Drafter
from sooner.draft.translate import Foreign, Words
from sooner.engine.calibrate import calibrate
from sooner.engine.detokenize import StreamDetokenizer
from sooner.engine.engine import Engine, Event
from sooner.engine.grammar import GrammarCompiler
from sooner.engine.grammar_vocab import vocabulary
from sooner.engine.logprobs import TokenLogprob
from sooner.engine.request import Request
from sooner.engine.stats import Acceptance
from sooner.engine.stop import FinishReason, Piece
from sooner.errors import ConfigError, RequestError
from sooner.model import load as loading
from sooner.model.protocol import Model
from sooner.model.pull import DEFAULT_MODEL
from sooner.model.threads import use as use_threads
from sooner.params import SamplingParams

Message = Mapping[str, str]
Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class Result:
    """What came of one prompt.

    token_ids hold the end-of-text id if one ended the text; `text` does not show it. stats: the
    acceptance record. logprobs: one entry a token if they were asked for; prompt_logprobs: one for every
    prompt token but the first. error: set when finish_reason is "error"; the tokens before it are right.
    alternatives: with n > 1 all n results, this one first (with best_of, the likeliest first).
    """

    text: str
    token_ids: tuple[int, ...]
    prompt_token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stats: Acceptance
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    error: str | None = None
    alternatives: tuple[Result, ...] = ()


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a stream: the new tokens, the text that became final, and with the last one the result."""

    token_ids: tuple[int, ...]
    pieces: tuple[Piece, ...]
    result: Result | None = None

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)


class LLM:
    """A target with a drafter.

        >>> llm = LLM("smollm2-135m")                                          # doctest: +SKIP
        >>> llm.generate("Once upon a time", SamplingParams(max_tokens=20)).text   # doctest: +SKIP

    model: a packaged name, a folder, a hub id, or a model loaded already (its dtype and device are kept).
    draft: one of `sooner.draft.registry.FORMS`, or an object that keeps the Drafter protocol.
    k: tokens guessed every step (0 = plain decoding). None: as many as pay, decided request by request and step
        by step from what passes cost on this machine and what guesses brought.
    width: most children of one node (default by drafter); above 1 the draft is a tree of up to k * width
        nodes, TREE_NODES at most for drafters that fill whatever they may. Without it these guess trees
        where rows of trees are exact to the bit, or the dtype is float32, and chains otherwise.
    dtype, device, runtime, quantize: see `sooner.model.load.load`. draft_dtype: that of a draft model, the
        target's by default.
    allow_pickles: read draft heads from .pt and .bin files too; they hold tensors only, or are refused.
    threads: that the CPU computes with, for the whole process; None = as many as pay on this machine.
    controller: a policy of its own instead of k and width.
    kv_memory: most memory for keys and values, of target and drafter together: bytes, or "512MiB"; None = as much
        as is needed. `str(llm.engine.memory)` says how far it goes. It replaces that of `config`.

    Safe to use from several threads; calls that overlap share the passes.
    """

    def __init__(
        self,
        model: str | loading.Loaded = DEFAULT_MODEL,
        draft: str | Drafter = "auto",
        *,
        k: int | None = None,
        width: int | None = None,
        dtype: str = "auto",
        draft_dtype: str | None = None,
        device: str = "auto",
        runtime: str = "auto",
        quantize: str | None = None,
        threads: int | None = None,
        context_limit: int | None = None,
        controller: Controller | None = None,
        config: EngineConfig | None = None,
        kv_memory: int | str | None = None,
        allow_pickles: bool = False,
    ) -> None:
        spec = registry.parse(draft, pickles=allow_pickles) if isinstance(draft, str) else None
        budget_for("", k, width)  # what is wrong with them is said before a model is loaded
        config = with_kv_memory(config, kv_memory)
        by_name = isinstance(model, str)
        if isinstance(model, str):
            model = loading.load(
                model, dtype=dtype, device=device, runtime=runtime, quantize=quantize, threads=threads
            )
        elif threads is not None:
            use_threads(threads)
        self.target = model
        spec, width = _fitted(spec, width, model)
        budget = budget_for(spec.name if spec else "", k, width)

        def load_draft(wanted: registry.Spec) -> Model | Foreign:
            name = wanted.argument or ""
            if wanted.name == "early-exit":
                return loading.first_layers(self.target.model, int(name) if name else None)
            if wanted.name == "self":
                kind = draft_dtype or str(self.target.model.lanes.store.dtype).removeprefix("torch.")
                return loading.load(
                    self.target.name,
                    dtype=kind,
                    device=str(self.target.device),
                    quantize=name,
                    threads=threads,
                ).model
            drafted = loading.load(
                name, dtype=draft_dtype or dtype, device=device, runtime=runtime, threads=threads
            )
            if loading.same_tokens(self.target.tokenizer, drafted.tokenizer):
                return drafted.model
            return Foreign(drafted.model, words(drafted), words(self.target))

        if spec is not None:
            drafter = registry.make(spec, self.target.model, load_draft)
        elif isinstance(draft, Drafter):
            drafter = draft
        else:
            raise ConfigError(f"draft must be a name or a Drafter, got {type(draft).__name__}.")
        adaptive = controller is None and k is None
        self._cost_file = _cost_file(self.target, drafter) if adaptive and by_name else None
        if controller is None:
            room = config.kv_memory if config else None
            controller = self._adaptive(budget, drafter.name, room) if adaptive else FixedController(budget)
        backend = self.target.backend
        self._grammars = GrammarCompiler(backend, self.target.model.vocab_size, self.target.eos_ids)
        self.engine = Engine(
            self.target.model,
            drafter,
            controller,
            eos_ids=self.target.eos_ids,
            detokenizer=lambda prompt, skip: StreamDetokenizer(backend, prompt, skip),
            encode=lambda text: self.target.encode(text, special=False),
            compile_grammar=self._grammars.compile,
            context_limit=context_limit,
            config=config,
        )
        self._lock = self.target.lock  # two LLMs on one model take turns
        self._gone: deque[Request] = deque()
        self._events: dict[str, deque[Event]] = {}

    def _adaptive(self, limit: Budget, drafter: str, room: int | None) -> Controller:
        costs = Costs() if self._cost_file is None else self._cost_file.costs
        if not costs.passes.known and drafter != "none":
            with self.target.lock:
                calibrate(self.target.model, costs.passes, room=room)
        return AdaptiveController(limit, costs)

    @overload
    def generate(self, prompts: str | list[int], params: SamplingParams | None = None) -> Result: ...

    @overload
    def generate(
        self, prompts: list[str] | list[list[int]], params: SamplingParams | None = None
    ) -> list[Result]: ...

    def generate(
        self, prompts: str | list[int] | list[str] | list[list[int]], params: SamplingParams | None = None
    ) -> Result | list[Result]:
        """Go on from one prompt (text or token ids) or several; one Result each, in order."""
        if isinstance(prompts, str):
            return self._run([self.encode(prompts)], params)[0]
        if not isinstance(prompts, list | tuple):
            raise RequestError(f"a prompt is a string or a list of token ids, got {type(prompts).__name__}.")
        ids = [prompt for prompt in prompts if isinstance(prompt, int)]
        if ids and len(ids) == len(prompts):
            return self._run([ids], params)[0]
        many = [prompt for prompt in prompts if isinstance(prompt, str | list | tuple)]
        if len(many) != len(prompts):
            raise RequestError("prompts must be all strings, all lists of token ids, or one list of token ids.")
        return self._run([self.encode(prompt) for prompt in many], params)

    def chat(self, messages: Sequence[Message] | str, params: SamplingParams | None = None) -> Result:
        """Answer a conversation (or a single user message) through the model's chat template."""
        return self._run([self.encode_chat(messages)], params)[0]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Stream:
        """Like `generate` for one prompt, as it is written. Closing or dropping the stream aborts the request."""
        wanted = params or SamplingParams()
        if wanted.texts > 1:
            raise ConfigError(f"a stream carries one text: n and best_of must be 1, got {wanted.texts}.")
        return Stream(self, self._add(self.encode(prompt), wanted))

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt. Raises RequestError if it is empty."""
        ids = self.target.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not ids:
            raise RequestError("the prompt is empty: it needs at least one token.")
        return ids

    def encode_chat(self, messages: Sequence[Message] | str) -> list[int]:
        """Token ids of a conversation, ready for the answer."""
        turns = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        if not turns:
            raise RequestError("the conversation is empty: it needs at least one message.")
        return self.target.encode_chat(turns)

    def _run(self, prompts: Sequence[Sequence[int]], params: SamplingParams | None) -> list[Result]:
        asked = params or SamplingParams()
        # best_of compares likelihoods, which are not reported unless they were asked for.
        compare = asked.texts > asked.n and asked.logprobs is None
        wanted = replace(asked, logprobs=0) if compare else asked
        requests: list[Request] = []
        try:
            for prompt in prompts:
                requests += [self._add(prompt, wanted, copy) for copy in range(wanted.texts)]
            for request in requests:
                while request.finish is None:
                    self._next(request)
        finally:
            for request in requests:
                self._drop(request)
        written = [result(request) for request in requests]
        each = wanted.texts
        best = [_best(written[i : i + each], wanted.n) for i in range(0, len(written), each)]
        return [_without_logprobs(one) for one in best] if compare else best

    def _add(self, prompt: Sequence[int], params: SamplingParams, copy: int = 0) -> Request:
        if params.structured_outputs is not None:
            self._grammars.compile(params.structured_outputs)  # may take seconds: before others have to wait
        with self._lock:
            request = self.engine.add(prompt, params, copy=copy)
            self._events[request.id] = deque()
        self._sweep()
        return request

    def _next(self, request: Request) -> Event | None:
        """The request's next event if there is one; else one step of the engine, for all."""
        with self._lock:
            if not self._events[request.id]:
                for event in self.engine.step():
                    if event.request.id in self._events:
                        self._events[event.request.id].append(event)
            queue = self._events[request.id]
            event_or_none = queue.popleft() if queue else None
        self._sweep()
        return event_or_none

    def _drop(self, request: Request) -> None:
        self._gone.append(request)
        self._sweep()

    def _sweep(self) -> None:
        """Abort what was dropped. The garbage collector may drop a stream in the middle of a step, in the very
        thread that holds the lock; then the holder sweeps when it is done."""
        while self._gone and self._lock.acquire(blocking=False):
            try:
                while self._gone:
                    request = self._gone.popleft()
                    self.engine.abort(request)
                    self._events.pop(request.id, None)
                if self._cost_file is not None:
                    self._cost_file.save_if_due()
            finally:
                self._lock.release()


class Stream(Iterator[Chunk]):
    """The chunks of one request. Use it in a `for`; `close` it, or let go of it, to abort the request."""

    def __init__(self, llm: LLM, request: Request) -> None:
        self._llm, self._request, self._open = llm, request, True

    def __next__(self) -> Chunk:
        while self._open:
            event = self._llm._next(self._request)
            if event is not None:
                final = None if event.finish is None else result(self._request)
                if final is not None:
                    self.close()
                return Chunk(event.tokens, event.pieces, final)
        raise StopIteration

    def close(self) -> None:
        """Abort the request if it has not ended."""
        if self._open:
            self._open = False
            self._llm._drop(self._request)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def result(request: Request) -> Result:
    """The result of a request that has ended."""
    if request.finish is None:
        raise RuntimeError(f"request {request.id} has not ended")
    return Result(
        request.writer.text,
        tuple(request.tokens[len(request.prompt) :]),
        request.prompt,
        request.finish,
        request.tally.close(),
        None if request.params.logprobs is None else tuple(request.logprobs),
        None if request.params.prompt_logprobs is None else tuple(request.prompt_logprobs),
        request.error,
    )


def _best(results: Sequence[Result], n: int) -> Result:
    """The first of n results, with all n beside it; the likeliest n where more were written."""
    if len(results) == 1:
        return results[0]
    if len(results) > n:
        results = sorted(results, key=lambda r: sum(t.logprob for t in r.logprobs or ()), reverse=True)[:n]
    return replace(results[0], alternatives=tuple(results))


def _without_logprobs(one: Result) -> Result:
    return replace(one, logprobs=None, alternatives=tuple(replace(a, logprobs=None) for a in one.alternatives))


def _fitted(
    spec: registry.Spec | None, width: int | None, target: loading.Loaded
) -> tuple[registry.Spec | None, int | None]:
    """What of a draft depends on the target: what comes with the package for it, and whether trees are exact."""
    if spec is None:
        return None, width
    if spec.name in TREES and width is None and not loading.even_trees(target.model):
        width = 1
    return shipped.fitted(spec, target.name, lambda: loading.fingerprint(target)), width


def _cost_file(target: loading.Loaded, drafter: Drafter) -> CostFile:
    return CostFile(cache_root() / "costs", target.costs_depend_on, drafter.name)


def words(loaded: loading.Loaded) -> Words:
    """A model's tokenizer, for a draft in other ids."""
    try:
        spelled = vocabulary(loaded.backend, loaded.model.vocab_size, loaded.eos_ids).spelled
    except ConfigError:  # its tokens are no pieces of the text (WordPiece): none is spelled alike in both
        spelled = ()
    return Words(
        spelled,
        loaded.encode,
        lambda ids: loaded.backend.decode(list(ids), skip_special_tokens=True),
        loaded.eos_ids,
    )
