"""Rules and drafters that look right and are not, each a mistake once made. Knows what `reject` should be.

The checkers of this folder are worth what they catch: every one of these must fail them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sooner.core.rules import Chance, Verdict, reject
from sooner.core.tree import ROOT, Draft, chain, children
from tests.core.enumeration import Judge, Make, World, grow, judge_match

Try = Callable[[Tensor, Draft, int], tuple[float, Tensor]]


def _top_down(laws: Tensor, draft: Draft, chance: Chance, attempt: Try) -> Verdict:
    """The walk of `reject` with another way to try a child; `attempt` gives (ratio, what is left)."""
    below = children(draft.parents)
    path: list[int] = []
    node = ROOT
    while True:
        p, found = laws[node + 1], None
        for child in below.get(node, ()):
            ratio, left = attempt(p, draft, child)
            if chance.coin(ratio, 0):
                found = child
                break
            p = left if bool(left.sum() > 0) else p
        if found is None:
            return Verdict(tuple(path), chance.pick(p, 0))
        path.append(found)
        node = found


def _rows(draft: Draft) -> Tensor:
    assert draft.probs is not None
    return draft.probs


def hot_q(laws: Tensor, draft: Draft, chance: Chance) -> Verdict:
    """Verifies against q at temperature 2, which is not what the tokens were drawn from."""
    if draft.probs is None:
        return reject(laws, draft, chance)
    warm = draft.probs.sqrt()
    return reject(laws, Draft(draft.tokens, draft.parents, warm / warm.sum(-1, keepdim=True)), chance)


def no_clamp(laws: Tensor, draft: Draft, chance: Chance) -> Verdict:
    """The residual is p - q, its negative part left in."""

    def attempt(p: Tensor, draft: Draft, child: int) -> tuple[float, Tensor]:
        token, q = draft.tokens[child], _rows(draft)[child]
        return float(p[token] / q[token]), torch.where(p == q, 0.0, p - q + 1e-3)

    return _top_down(laws, draft, chance, attempt)


def absolute_residual(laws: Tensor, draft: Draft, chance: Chance) -> Verdict:
    """The residual is |p - q|."""

    def attempt(p: Tensor, draft: Draft, child: int) -> tuple[float, Tensor]:
        token, q = draft.tokens[child], _rows(draft)[child]
        left = (p - q).abs()
        return float(p[token] / q[token]), left / left.sum()

    return _top_down(laws, draft, chance, attempt)


def plain_residual(laws: Tensor, draft: Draft, chance: Chance) -> Verdict:
    """The correction is drawn from p itself."""

    def attempt(p: Tensor, draft: Draft, child: int) -> tuple[float, Tensor]:
        token = draft.tokens[child]
        return float(p[token] / _rows(draft)[child][token]), p

    return _top_down(laws, draft, chance, attempt)


def first_q_again(laws: Tensor, draft: Draft, chance: Chance) -> Verdict:
    """Every sibling is tested against the q of the first, though it was drawn without replacement."""
    below = children(draft.parents)
    probs = _rows(draft).clone()
    for nodes in below.values():
        probs[nodes] = probs[nodes[0]].clone()
    return reject(laws, Draft(draft.tokens, draft.parents, probs), chance)


def fresh_p_each(laws: Tensor, draft: Draft, chance: Chance) -> Verdict:
    """Every sibling is tested against the whole of p, not against what the earlier ones left."""
    below = children(draft.parents)
    path: list[int] = []
    node = ROOT
    while True:
        p, left, found = laws[node + 1], laws[node + 1], None
        for child in below.get(node, ()):
            token, q = draft.tokens[child], _rows(draft)[child]
            if chance.coin(float(p[token] / q[token]), 0):
                found = child
                break
            left = (p - q).clamp(min=0)
        if found is None:
            return Verdict(tuple(path), chance.pick(left if bool(left.sum() > 0) else p, 0))
        path.append(found)
        node = found


def keeps_tried_guesses(laws: Tensor, draft: Draft, chance: Chance) -> Verdict:
    """A rejected copy stays in the law that its siblings and the correction see."""
    return _top_down(laws, draft, chance, lambda p, d, child: (float(p[d.tokens[child]]), p))


def forgets_to_normalise(laws: Tensor, draft: Draft, chance: Chance) -> Verdict:
    """A rejected copy is removed, but what is left is not made a law again before the next test."""

    def attempt(p: Tensor, draft: Draft, child: int) -> tuple[float, Tensor]:
        left = p.clone()
        left[draft.tokens[child]] = 0
        return float(p[draft.tokens[child]]), left

    return _top_down(laws, draft, chance, attempt)


def accepts_all(laws: Tensor, draft: Draft, chance: Chance) -> Verdict:
    """Every first child is taken; the law decides the bonus alone."""
    return _top_down(laws, draft, chance, lambda p, d, child: (1.0, p))


def bonus_from_root(laws: Tensor, draft: Draft, chance: Chance) -> Verdict:
    """Takes the token that follows from the row before the right one."""
    shifted = laws.clone()
    for node in range(len(draft)):
        if node not in draft.parents:
            shifted[node + 1] = laws[draft.parents[node] + 1]
    return reject(shifted, draft, chance)


def redraws(laws: Tensor, draft: Draft, chance: Chance) -> Verdict:
    """*match* that draws anew where its own choice was not in the draft."""
    verdict = judge_match(laws, draft, chance)
    last = verdict.path[-1] if verdict.path else ROOT
    return Verdict(verdict.path, chance.pick(laws[last + 1], 0))


def block_token_by_token(laws: Tensor, draft: Draft, chance: Chance) -> Verdict:
    """The coins of *block*, but the first that falls wrong ends it, and the residual is that of *reject*."""
    alive, kept = 1.0, 0
    for node in range(len(draft)):
        token, q = draft.tokens[node], _rows(draft)[node]
        alive = min(1.0, alive * float(laws[node][token] / q[token]))
        if not chance.coin(alive, 0):
            break
        kept = node + 1
    p = laws[kept]
    if kept < len(draft):
        left = (p - _rows(draft)[kept]).clamp(min=0)
        p = left if bool(left.sum() > 0) else p
    return Verdict(tuple(range(kept)), chance.pick(p, 0))


def traversal_by_q_left(laws: Tensor, draft: Draft, chance: Chance) -> Verdict:
    """*traversal*, but a parent that has lost a child goes on with S / (what q has left), not S / (S + 1 - P)."""
    below = {node: list(nodes) for node, nodes in children(draft.parents).items()}
    law, alive = {ROOT: laws[0]}, {ROOT: 1.0}
    while True:
        path: list[int] = []
        while below.get(path[-1] if path else ROOT):
            path.append(below[path[-1] if path else ROOT][0])
        for parent, node in zip([ROOT, *path], path, strict=False):
            if node not in alive:
                ratio = float(law[parent][draft.tokens[node]] / _rows(draft)[node][draft.tokens[node]])
                alive[node], law[node] = min(1.0, alive[parent] * ratio), laws[node + 1]
        last = path[-1] if path else ROOT
        if not path or chance.coin(alive[last], 0):
            return Verdict(tuple(path), chance.pick(law[last], 0))
        parent = draft.parents[last]
        q = _rows(draft)[last]
        left = (alive[parent] * law[parent] - q).clamp(min=0)
        below[parent].remove(last)
        if parent != ROOT:
            rest = float(q.sum() - q[draft.tokens[last]])
            alive[parent] = min(1.0, float(left.sum()) / rest) if rest > 0 else alive[parent]
        law[parent] = left / left.sum() if bool(left.sum() > 0) else law[parent]


DRAWN_RULES: dict[str, Judge] = {
    rule.__name__: rule
    for rule in (
        hot_q,
        absolute_residual,
        plain_residual,
        accepts_all,
        bonus_from_root,
        redraws,
        block_token_by_token,
    )
}
SIBLING_RULES: dict[str, Judge] = {rule.__name__: rule for rule in (first_q_again, fresh_p_each)}
GUESS_RULES: dict[str, Judge] = {
    rule.__name__: rule
    for rule in (keeps_tried_guesses, forgets_to_normalise, accepts_all, bonus_from_root, redraws)
}


def drops_unlikely(world: World, chance: Chance) -> Draft:
    """A drawn token is left out because of its own value, and the law is used as if nothing was drawn."""
    token = chance.pick(world.q(()), 0)
    return chain([token], world.q(())[None]) if world.q(())[token] >= 0.5 else Draft()


def reorders_siblings(world: World, chance: Chance) -> Draft:
    """Siblings drawn one after the other, then put with the likelier first."""
    draft = grow((ROOT, ROOT), world.q, lambda law, rank: chance.pick(law, 0), drawn=True)
    if len(draft) < 2:
        return draft
    q = world.q(())
    first, second = sorted(draft.tokens, key=lambda token: -float(q[token]))
    left = q.clone()
    left[first] = 0
    return Draft((first, second), (ROOT, ROOT), torch.stack([q, left / left.sum()]))


def copies_with_weight(world: World, chance: Chance) -> Draft:
    """An argmax that claims to be a draw from q."""
    q = world.q(())
    return chain([int(q.argmax())], q[None])


DRAFTERS: dict[str, Make] = {
    make.__name__: make for make in (drops_unlikely, reorders_siblings, copies_with_weight)
}
