"""A drafter may fail, its request may not: calls drafters, checks what they return, counts failures.

Knows the drafter protocol and nothing of laws, rules or models.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from sooner.config import Budget
from sooner.core.tree import EMPTY, Draft, children, depths
from sooner.draft.protocol import Context, Drafter, Outcome

logger = logging.getLogger("sooner")

_SUM_TOLERANCE = 1e-3


class Guard:
    """Stands between the engine and a drafter. `failures` counts by kind of failure."""

    def __init__(self, drafter: Drafter, vocab: int) -> None:
        self.drafter = drafter
        self.failures: dict[str, int] = {}
        self._vocab = vocab

    def propose(
        self, contexts: Sequence[Context], budgets: Sequence[Budget]
    ) -> tuple[list[Draft], list[str | None]]:
        """One draft for each context, empty where the drafter failed, and what went wrong there."""
        try:
            drafts = list(self.drafter.propose(contexts, budgets))
        except Exception as error:
            return self._all_failed(contexts, self._note("raised", error))
        if len(drafts) != len(contexts):
            return self._all_failed(contexts, self._note("wrong count", f"{len(drafts)} for {len(contexts)}"))
        problems = [
            problem(draft, budget, self._vocab, with_probs=context.rule != "match" and not context.law.greedy)
            for draft, context, budget in zip(drafts, contexts, budgets, strict=True)
        ]
        for found in problems:
            if found is not None:
                self._note("malformed", found)
        return [d if p is None else EMPTY for d, p in zip(drafts, problems, strict=True)], problems

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        try:
            self.drafter.observe(outcomes)
        except Exception as error:
            self._note("observe raised", error)

    def forget(self, request_id: str) -> None:
        try:
            self.drafter.forget(request_id)
        except Exception as error:
            self._note("forget raised", error)

    def _all_failed(self, contexts: Sequence[Context], why: str) -> tuple[list[Draft], list[str | None]]:
        return [EMPTY] * len(contexts), [why] * len(contexts)

    def _note(self, kind: str, detail: object) -> str:
        if kind not in self.failures:
            logger.warning("drafter %r failed (%s: %s); the text is not affected", self.drafter.name, kind, detail)
        self.failures[kind] = self.failures.get(kind, 0) + 1
        return f"{kind}: {detail}"


def problem(draft: object, budget: Budget, vocab: int, *, with_probs: bool) -> str | None:
    """What is wrong with a draft, or None. `with_probs`: also check the laws it was drawn from."""
    if not isinstance(draft, Draft):
        return f"expected a Draft, got {type(draft).__name__}"
    if not len(draft):
        return None
    if not all(type(token) is int and 0 <= token < vocab for token in draft.tokens):
        return f"token ids must be ints from 0 to {vocab - 1}, got {draft.tokens}"
    depth = max(depths(draft.parents))
    width = max(len(nodes) for nodes in children(draft.parents).values())
    if len(draft) > budget.nodes or depth > budget.depth or width > budget.width:
        return (
            f"{len(draft)} nodes, depth {depth}, width {width}, but the budget is "
            f"{budget.nodes} nodes, depth {budget.depth}, width {budget.width}"
        )
    return _probs_problem(draft, vocab) if with_probs and draft.probs is not None else None


def _probs_problem(draft: Draft, vocab: int) -> str | None:
    probs = draft.probs
    if probs is None or probs.shape[1] != vocab or not probs.is_floating_point():
        return f"probs must be floats [n, {vocab}]"
    sums = probs.sum(-1, dtype=torch.float64)
    own = probs.gather(-1, torch.tensor(draft.tokens, device=probs.device)[:, None])
    # A NaN or an infinity anywhere makes its row's sum fail the comparison.
    if not bool(((sums - 1).abs() < _SUM_TOLERANCE).all()) or not bool((probs >= 0).all()):
        return "each row of probs must be a probability distribution"
    if not bool((own > 0).all()):
        return "a token was proposed that its own probs give no mass"
    return None
