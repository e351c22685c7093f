"""What a head that guesses several tokens ahead is judged by: cross-entropy, and guesses in a row. Knows no head.

Everywhere `seen` is, for each number of tokens ahead, what the LM head reads at every slot, [B * T, h].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sooner.train.windows import Batch, Labels, have_label, labels


def wide(x: Tensor) -> Tensor:
    """At least float32."""
    return x if x.dtype == torch.float64 else x.float()


class _ReadLoss(torch.autograd.Function):
    """Cross-entropy of the LM head against the target's candidates, each row by its weight; its gradient is
    made at once, for all steps in one product. The only V-wide rows are of the model's own type."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, matrix: Tensor, ids: Tensor, probs: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        law = torch.softmax(x @ matrix.T, dim=-1)
        own = wide(law.gather(-1, ids))
        nats = -(wide(probs) * own.clamp(min=1e-9).log()).sum(-1)
        law.scatter_add_(-1, ids, -probs.to(law.dtype))  # now the gradient by the logits
        weight = weight.to(nats.dtype)
        narrow = weight[:, None].to(law.dtype)
        d_matrix = law.T @ (x * narrow) if ctx.needs_input_grad[1] else None
        ctx.save_for_backward((law @ matrix).mul_(narrow), d_matrix)
        mean = nats.mean()
        ctx.mark_non_differentiable(mean)
        return (nats * weight).sum(), mean

    @staticmethod
    def backward(ctx: Any, scale: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        d_x, d_matrix = ctx.saved_tensors
        scale = scale.to(d_x.dtype)
        return d_x.mul_(scale), None if d_matrix is None else d_matrix.mul_(scale), None, None, None


def drawn(batch: Batch, steps: int, share: float, generator: torch.Generator) -> list[Labels]:
    """The slots whose loss is taken at each step, and what they have to say. share: part of those with a label."""
    chosen = []
    count = batch.tokens.numel()
    for step in range(steps):
        have = have_label(batch, step).flatten().nonzero()[:, 0]
        # Always as many rows: kernels are compiled for each number of them.
        some = torch.randperm(len(have), generator=generator)[: max(int(count * share), 1)]
        chosen.append(labels(batch, step, None if share >= 1 else have[some.to(have.device)]))
    return chosen


def loss(
    seen: Sequence[Tensor], matrix: Tensor, batch: Batch, decay: float, share: float, generator: torch.Generator
) -> tuple[Tensor, float]:
    """(what to descend, mean cross-entropy over all steps). matrix: the LM head's, [ids, h].

    share: part of the slots whose loss is taken, drawn anew at each step: the LM head is most of the work.
    """
    wanted = drawn(batch, len(seen), share, generator)
    return loss_of([states[these.rows] for states, these in zip(seen, wanted, strict=True)], matrix, wanted, decay)


def loss_of(
    read: Sequence[Tensor], matrix: Tensor, wanted: Sequence[Labels], decay: float
) -> tuple[Tensor, float]:
    """The same of the slots `wanted` alone; read: what the LM head reads there, at each step."""
    rows = [len(these.rows) for these in wanted]
    weights = [torch.full((n,), decay**step / max(n, 1), device=read[0].device) for step, n in enumerate(rows)]
    ids, probs = torch.cat([w.ids for w in wanted]), torch.cat([w.probs for w in wanted])
    total, mean = _ReadLoss.apply(  # type: ignore[no-untyped-call]  # torch's own
        torch.cat(list(read)), matrix, ids, probs, torch.cat(weights)
    )
    return total, float(mean)


@dataclass(frozen=True, slots=True)
class Score:
    """Held-out text. rows: slots scored. chain, tree: mean over them of the number of steps in a row at which the
    text's own token was the head's first choice, or among its first four. loss: of the first step."""

    rows: int
    chain: float
    tree: float
    loss: float

    def __add__(self, other: Score) -> Score:
        rows = max(self.rows + other.rows, 1)
        mean = [
            (a * self.rows + b * other.rows) / rows
            for a, b in ((self.chain, other.chain), (self.tree, other.tree), (self.loss, other.loss))
        ]
        return Score(self.rows + other.rows, *mean)

    def told(self) -> dict[str, float]:
        """As the history keeps it; chain and tree with the target's own token, so tokens a step."""
        return {"held_out_loss": self.loss, "chain": 1 + self.chain, "tree": 1 + self.tree}


@torch.no_grad()
def score(seen: Sequence[Tensor], project: Callable[[Tensor], Tensor], vocab: Tensor, batch: Batch) -> Score:
    """Judge guesses on a batch, where the target wrote the text. vocab: the target's id of each draft id."""
    rows = (have_label(batch, len(seen)) & torch.roll(batch.answer, -2, dims=1)).flatten().nonzero()[:, 0]
    flat = batch.tokens.flatten()
    chain = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
    tree, chains, trees, nats = chain.clone(), 0.0, 0.0, 0.0
    for step, states in enumerate(seen):
        logits = project(states[rows])
        best = vocab[logits.topk(min(4, logits.shape[-1]), dim=-1).indices]
        hit = best == flat[rows + 2 + step][:, None]
        chain, tree = chain & hit[:, 0], tree & hit.any(-1)
        chains, trees = chains + float(chain.sum()), trees + float(tree.sum())
        if step == 0:
            own = torch.log_softmax(logits.float(), -1).gather(-1, batch.ids.flatten(0, 1)[rows + 1])
            nats = float(-(own * batch.probs.flatten(0, 1)[rows + 1].float()).sum())
    count = max(len(rows), 1)
    return Score(len(rows), chains / count, trees / count, nats / count)
