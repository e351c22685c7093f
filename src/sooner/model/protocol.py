"""What the engine and the drafters ask of a model. Knows no implementation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from sooner.core.step import Step
from sooner.model.lanes import LaneCache


@dataclass(frozen=True, slots=True)
class Output:
    """logits: [len(rows), V], in the model's own type. features: [N, len(taps), H], or None without taps."""

    logits: Tensor
    features: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Ends:
    """The two ends of a model, for draft heads that share them.

    embedding: [V, H]. norm: weight of the final norm, [H], or None. project: final, normalised states
    [N, H] -> logits [N, V]. head: the LM head's weight [V, H]; a call, since it may have to be unpacked.
    """

    embedding: Tensor
    norm: Tensor | None
    project: Callable[[Tensor], Tensor]
    head: Callable[[], Tensor]


@runtime_checkable
class WithEnds(Protocol):
    """A model that lets draft heads share its embedding and LM head."""

    def ends(self) -> Ends:
        """What draft heads share with this model."""


class Model(Protocol):
    """A causal language model over lanes. Target and draft model are two instances of this.

    vocab_size: width of the logits. context_limit: most tokens one lane may hold, None = no limit known.
    """

    vocab_size: int
    context_limit: int | None
    lanes: LaneCache

    def forward(self, step: Step, *, rows: Tensor, taps: Sequence[int] = ()) -> Output:
        """One pass. Afterwards every lane of the step has the step's tokens staged.

        rows: int64 [L], the rows whose logits are wanted; the others skip the LM head.
        taps: layers whose input stream is wanted: 0 = the embeddings, number of layers = the final,
            normalised state that the LM head reads.
        If it raises, no token of the step is staged.
        """
