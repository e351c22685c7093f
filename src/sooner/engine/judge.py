"""From the logits of one pass to verdicts and log-probabilities. Changes no request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sooner.core.edit import Edit, LawParams, Past, apply, widened
from sooner.core.host import sent
from sooner.core.law import Law, law, log_probs
from sooner.core.rules import Verdict
from sooner.core.step import Segment, Step
from sooner.core.tree import ROOT, Draft
from sooner.core.verify import Trial, verify
from sooner.engine.logprobs import TokenLogprob, report
from sooner.engine.request import Request

_PLAIN = LawParams()  # rows that are only scored
_SLICE = 64  # prompt rows scored at a time: a V-wide float32 table each


@dataclass(frozen=True, slots=True)
class Judged:
    """verdicts: one for each segment, None where no law was wanted. logits: as the model gave them.
    shaped: the same after bias, penalties and masks. errors: by request, what a processor of the caller's
    raised; its rows are broken then."""

    verdicts: tuple[Verdict | None, ...]
    logits: Tensor
    shaped: Tensor
    laws: Law | None
    errors: Mapping[str, str]

    def chosen(self, step: Step, s: int) -> Tensor:
        """The model's logits of the root and the surviving nodes of segment s, [n, V]; n = 0 without a law."""
        verdict, first = self.verdicts[s], step.law_starts[s]
        if verdict is None or first is None:
            return self.logits[:0]
        return self.logits[[first, *(first + 1 + node for node in verdict.path)]]

    def logprobs(self, request: Request, step: Step, s: int, taken: int) -> list[TokenLogprob]:
        """Of the last `taken` tokens of the request of segment s, in the mode it asked for."""
        verdict, first = self.verdicts[s], step.law_starts[s]
        if request.params.logprobs is None or verdict is None or first is None or not taken:
            return []
        rows = [first, *(first + 1 + node for node in verdict.path)][:taken]
        tokens = request.tokens[-taken:]
        if request.params.logprobs_mode == "raw" or self.laws is None:
            logs = log_probs(self.logits[sent(rows, torch.int64, self.logits.device)])
        else:
            logs = torch.stack([_processed(self.laws, self.shaped, r) for r in rows])
        return report(logs, tokens, request.params.logprobs)

    def prompt_logprobs(self, request: Request, step: Step, s: int) -> list[TokenLogprob]:
        """Of the prompt tokens that segment s predicts, in order."""
        first, segment = step.score_starts[s], step.segments[s]
        if request.params.prompt_logprobs is None or first is None:
            return []
        tokens = request.prompt[segment.start + 1 : segment.start + 1 + len(segment.certain)]
        known = len(request.prompt_logprobs) - segment.start  # above 0 when it lost its place and came again
        found = []
        for at in range(known, len(tokens), _SLICE):
            some = tokens[at : at + _SLICE]
            logs = log_probs(self.logits[first + at : first + at + len(some)])
            found += report(logs, some, request.params.prompt_logprobs)
        return found


def judge(
    requests: Sequence[Request],
    step: Step,
    logits: Tensor,
    *,
    keep: bool = False,
    firsts: Sequence[tuple[int, float]] | None = None,
) -> Judged:
    """logits [len(step.law_rows), V]; one request for each segment of the step.

    The logits are edited in place unless somebody reads them as the model gave them; `keep`: the caller does.
    firsts: each row's likeliest id and its logit, where they are known."""
    logits = logits.detach() if logits.requires_grad else logits
    params = [_PLAIN] * logits.shape[0]
    trials: list[Trial] = []
    errors: dict[str, str] = {}
    shaped, edited = logits, False
    raw = keep or any(_wants_raw(request) for request in requests)
    for request, segment, first in zip(requests, step.segments, step.law_starts, strict=True):
        if first is None:
            continue
        rows = slice(first, first + 1 + len(segment.draft))
        params[rows] = [request.law] * (1 + len(segment.draft))
        trials.append(Trial(first, segment.draft, segment.root, request.seed, request.rule))
        if request.history is not None:
            if shaped is logits and not edited:
                # Raw log-probabilities are read later; where nobody wants them the logits are edited in place.
                shaped = widened(logits) if raw else logits if logits.dtype == torch.float64 else logits.float()
            edited = True
            try:
                apply(shaped, _edit(request, segment, first, request.history.past()))
            except Exception as error:  # a caller's processor, or a grammar: this request's fault alone
                shaped[rows] = torch.nan
                errors[request.id] = f"{type(error).__name__}: {error}"
    if not trials:
        return Judged((None,) * len(requests), logits, logits, None, errors)
    laws = law(shaped, params, firsts=None if edited else firsts)
    verdicts = iter(verify(laws, trials))
    judged = tuple(None if first is None else next(verdicts) for first in step.law_starts)
    return Judged(judged, logits, shaped, laws, errors)


def _wants_raw(request: Request) -> bool:
    params = request.params
    return params.prompt_logprobs is not None or (params.logprobs is not None and params.logprobs_mode == "raw")


def _edit(request: Request, segment: Segment, first: int, past: Past) -> Edit:
    mask = None if request.constraint is None else request.constraint.masks(segment.draft)
    return Edit(first, request.law, past, paths(segment.draft), mask)


def paths(draft: Draft) -> list[tuple[int, ...]]:
    """The drafted tokens from the root to each row: () for the root, then one for each node."""
    found: list[tuple[int, ...]] = [()]
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        found.append((*found[0 if parent == ROOT else parent + 1], token))
    return found


def wants_scores(request: Request) -> bool:
    """Whether there are prompt tokens without a score yet."""
    wanted = request.params.prompt_logprobs is not None
    return wanted and len(request.prompt_logprobs) < len(request.prompt) - 1


def _processed(laws: Law, shaped: Tensor, r: int) -> Tensor:
    row = laws.row(r)
    return log_probs(shaped[r]) if row is None else row.log()
