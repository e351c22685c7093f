"""How likely each node of a draft is to be accepted, learnt from what became of earlier ones. Knows no pass.

A node's chance, given that its parent was accepted, is what the drafter's score says of it, as far as such scores
proved true (or, without scores, what nodes of its depth and place among its siblings came to), over all requests;
shifted by how this request has done better or worse than that.

What was offered but not verified teaches too: the text that is written afterwards says whether it was right. So a
drafter whose guesses are not worth verifying is still watched, for the price of its guessing alone.

In Python (belief_plain.py), and in C (belief_native.py) where there is a compiler: it is done twice a step, for
every node.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sooner.control.belief_native import NativeBeliefs
from sooner.control.belief_plain import PlainBeliefs
from sooner.control.protocol import Guess, Tried
from sooner.control.state import Nodes, Worth
from sooner.native.belief import Prices
from sooner.native.control import serves


class Beliefs(Protocol):
    """Chances of nodes, for one drafter and all requests it serves. waiting: requests with a guess that the text
    is still being compared with."""

    waiting: set[str]

    def weigh(self, guesses: Sequence[tuple[str, Guess]], floor: float, prices: Prices) -> tuple[Nodes, Worth]:
        """Of guesses for these requests the nodes that have a chance of `floor` at least (of drawn ones all), and
        how many of them are worth what rows cost. prices: for as many rows as there are nodes."""

    def levels(self, request_ids: Sequence[str], depth: int) -> list[list[float]]:
        """Of each request, for depths 1 to `depth`: the chance that a draft is accepted at least so far; without
        the tiny ones."""

    def learn(self, tried: Sequence[Tried]) -> list[int]:
        """Take in what one pass brought for requests. How many guesses of each, not verified, were right."""

    def __len__(self) -> int:
        """How many requests something is known of."""

    def forget(self, request_id: str) -> None:
        """The request has ended."""


def begin() -> Beliefs:
    """The ones in C if they can be had."""
    return NativeBeliefs() if serves() else PlainBeliefs()
