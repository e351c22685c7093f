"""EAGLE heads as drafter: dynamic trees and chains from the target's features. Knows nothing of acceptance.

A slot of the head is a function of the text before it, so its lane follows the text by content, like any
other; only slots made of the target's own features stay, those of guesses are scratch. Features come with
the outcomes, for rows the target has run; what was run before a request was first seen is simply not there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sooner.config import Budget
from sooner.core.tree import EMPTY, Draft, follow
from sooner.draft.eagle_native import NativeRunner, fits
from sooner.draft.eagle_torch import TorchRunner
from sooner.draft.protocol import Context, Outcome
from sooner.draft.runner import Fitted, Part, Runner
from sooner.errors import ConfigError, DraftError
from sooner.heads.checkpoint import Checkpoint
from sooner.model.protocol import Ends

_FEW = 64  # rows of features that are kept whole for the last of them
_CHUNK = 512  # slots made in one pass of the head while catching up with a prompt


@dataclass(slots=True)
class _State:
    """One request: its lane; features not yet made into slots, those last made; slots made, rows ever seen;
    the place in the text of the first row seen."""

    lane: int
    waiting: list[Tensor] = field(default_factory=list)
    last: Tensor | None = None
    made: int = 0
    seen: int = 0
    first: int | None = None


class EagleDrafter:
    """Drafts with the head of `checkpoint` for a target of `layers` layers with these `ends`.

    beams: nodes of one level that are expanded. least: drafting goes no deeper once all nodes to be expanded
    together are less likely than this to be reached: a step of the head would cost more than it brings.
    native: run the head in C where that can be; quantize: with weights at fewer bits then, a kind of
    model.quantize.KINDS.
    Raises DraftError for a head that does not fit the target, ConfigError for settings without sense.
    """

    name = "eagle"

    def __init__(
        self,
        checkpoint: Checkpoint,
        ends: Ends,
        *,
        layers: int,
        vocab: int,
        beams: int = 8,
        least: float = 0.1,
        native: bool = True,
        quantize: str | None = None,
    ) -> None:
        if beams < 1 or not 0 <= least <= 1:
            raise ConfigError(f"eagle needs beams >= 1 and 0 <= least <= 1, got {beams} and {least}.")
        head, own = checkpoint.head, checkpoint.embedding
        _check_fit(checkpoint, ends, vocab)
        place, kind = ends.embedding.device, ends.embedding.dtype
        fitted = Fitted(
            head.to(place, kind).eval().requires_grad_(False),
            ends.embedding if own is None else own.to(place, kind),
            None if checkpoint.ids is None else checkpoint.ids.to(place),
            ends,
            beams,
            least,
            quantize,
        )
        self.taps = checkpoint.taps_for(layers)
        self._runner: Runner = NativeRunner(fitted) if native and fits(fitted) else TorchRunner(fitted)
        self._states: dict[str, _State] = {}

    @property
    def lanes_in_use(self) -> int:
        """Requests that hold a lane of the head."""
        return self._runner.lanes.in_use

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        drafts = [EMPTY] * len(contexts)
        parts = {
            i: part
            for i, (context, budget) in enumerate(zip(contexts, budgets, strict=True))
            if not budget.empty and (part := self._part(context, budget)) is not None
        }
        while long := [i for i, part in parts.items() if len(part.features) > _CHUNK]:
            pieces = {i: parts[i].split(_CHUNK) for i in long}
            self._runner.draft([now for now, _ in pieces.values()])
            parts |= {i: rest for i, (_, rest) in pieces.items()}
        if parts:
            made = self._runner.draft(list(parts.values()))
            for (i, part), draft in zip(parts.items(), made, strict=True):
                state = self._states[contexts[i].request_id]
                state.made, state.waiting = part.end, []
                # Few rows are kept whole: copying one takes longer than all else that Python does here.
                state.last = part.features if len(part.features) <= _FEW else part.features[-1:].clone()
                drafts[i] = draft
        return drafts

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            if outcome.features is None or not len(outcome.features):
                continue
            path = follow(outcome.draft, outcome.tokens[: outcome.accepted])
            if len(path) < outcome.accepted or len(outcome.draft) != outcome.drafted:
                self.forget(outcome.request_id)  # which rows are the text's is not known
                continue
            certain = len(outcome.features) - outcome.drafted
            features = outcome.features[:certain]
            if path:
                rows = torch.tensor([certain + node for node in path], device=features.device)
                features = torch.cat([features, outcome.features[rows]])
            state = self._states.get(outcome.request_id)
            if state is None:
                state = self._states[outcome.request_id] = _State(self._runner.lanes.open())
            state.waiting.append(features)
            state.seen += len(features)

    def forget(self, request_id: str) -> None:
        state = self._states.pop(request_id, None)
        if state is not None:
            self._runner.lanes.close(state.lane)

    def _part(self, context: Context, budget: Budget) -> Part | None:
        """What a request has to make and draft, if what is kept of it goes with its text; if not, it goes."""
        state = self._states.get(context.request_id)
        if state is None:
            return None
        known = len(context.tokens) - 1  # tokens the target has run: all but the last
        if state.first is None:
            state.first = known - state.seen
        text = context.tokens[state.first + 1 :] if state.first >= 0 else []
        right = state.first >= 0 and state.first + state.seen == known
        if not right or self._runner.lanes.settle(state.lane, text) != state.made:
            self.forget(context.request_id)  # the id has a new life, or rows were missed
            return None
        if not state.waiting:  # asked again: the last slot is made anew, for what follows from it
            assert state.last is not None
            return Part(state.lane, state.made - 1, state.first, text, state.last[-1:], budget)
        features = torch.cat(state.waiting) if len(state.waiting) > 1 else state.waiting[0]
        return Part(state.lane, state.made, state.first, text, features, budget)


def _check_fit(checkpoint: Checkpoint, ends: Ends, vocab: int) -> None:
    config = checkpoint.head.config
    hidden = ends.embedding.shape[1]
    if config.target_hidden != hidden:
        raise DraftError(f"the head reads streams {config.target_hidden} wide, the target's are {hidden} wide.")
    if config.vocab != vocab:
        raise DraftError(
            f"the head is for {config.vocab} token ids, the target has {vocab}: another target's head?"
        )
