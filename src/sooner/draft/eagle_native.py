"""An EAGLE head run as one call of C: native/eagle.c. Knows no request, no text and no acceptance."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import exp

import torch
from torch import Tensor, nn

from sooner.core.tree import EMPTY, Draft
from sooner.draft.runner import Fitted, Part
from sooner.heads.eagle import EagleConfig, Norm
from sooner.model.lanes import LaneCache
from sooner.model.quantize import panels
from sooner.native.eagle import Asked, Found, NativeHead, Shape, Weights, serves

_ACTS = ("silu", "gelu_pytorch_tanh")


def fits(fitted: Fitted) -> bool:
    """Whether NativeRunner can run this head here: its device, sizes, dtype and activation, and a compiler."""
    config, embedding = fitted.head.config, fitted.embedding
    return embedding.is_cpu and config.act in _ACTS and serves(_shape(config), embedding.dtype)


class NativeRunner:
    """Runs the head of `fitted`, of which `fits` is true."""

    def __init__(self, fitted: Fitted) -> None:
        config = fitted.head.config
        self._kind = fitted.embedding.dtype
        self._native = NativeHead(
            _shape(config),
            _weights(fitted),
            config.rope.frequencies(config.head_dim),
            fitted.beams,
            fitted.least,
            None if fitted.quantize is None else partial(panels, fitted.quantize),
        )
        self.lanes = LaneCache(1, config.kv_heads, config.head_dim, self._kind)

    def draft(self, parts: Sequence[Part]) -> list[Draft]:
        """One call for all parts; see Runner."""
        asked = [_asked(part) for part in parts]
        for one in asked:
            self.lanes.reserve(one.lane, one.held, self._native.columns(one))
        features = torch.cat([part.features for part in parts]) if len(parts) > 1 else parts[0].features
        found = self._native.draft(asked, features.to(self._kind).contiguous(), self.lanes.store)
        for part in parts:
            part.settle(self.lanes)
        return [_draft(nodes) for nodes in found]


def _asked(part: Part) -> Asked:
    b = part.budget
    if b.empty:
        return Asked(part.lane, part.held, part.tokens, part.first)
    return Asked(part.lane, part.held, part.tokens, part.first, b.depth, b.width, b.nodes)


def _draft(found: Found) -> Draft:
    if not found.tokens:
        return EMPTY
    return Draft(tuple(found.tokens), tuple(found.parents), None, tuple(exp(score) for score in found.scores))


def _shape(c: EagleConfig) -> Shape:
    return Shape(
        hidden=c.hidden, inner=c.intermediate, heads=c.heads, kv_heads=c.kv_heads, dim=c.head_dim,
        vocab=c.draft_vocab, streams=c.streams, width=c.target_hidden, eps=c.eps,
        normed_residual=c.norm_before_residual, norm_output=c.norm_output, gelu=c.act != "silu",
    )  # fmt: skip


def _weights(fitted: Fitted) -> Weights:
    head = fitted.head
    streams = [norm.weight.detach() for norm in head.fc_norms if isinstance(norm, Norm)]
    return Weights(
        fc=_map(head.fc), qkv=_map(head.qkv), out=head.out.weight.detach(), gate_up=head.gate_up.weight.detach(),
        down=head.down.weight.detach(), head=_lm_head(fitted), embedding=fitted.embedding.detach(),
        before_mlp=head.before_mlp.weight.detach(), norm=_norm(head.norm), token_norm=_norm(head.token_norm),
        feature_norm=_norm(head.feature_norm), stream_norm=torch.cat(streams) if streams else None,
        input_norm=_norm(head.input_norm), ids=fitted.ids,
    )  # fmt: skip


def _lm_head(fitted: Fitted) -> Tensor:
    own = fitted.head.head
    return fitted.ends.head() if own is None else own.weight.detach()


def _map(linear: nn.Linear) -> tuple[Tensor, Tensor | None]:
    return linear.weight.detach(), None if linear.bias is None else linear.bias.detach()


def _norm(norm: Norm | None) -> Tensor | None:
    return None if norm is None else norm.weight.detach()
