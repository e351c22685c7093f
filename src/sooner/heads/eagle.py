"""EAGLE heads (1, 2 and 3): one decoder layer over (token, feature) slots. Knows no target, no text and no file.

Slot i joins the embedding of token i + 1 with the target's features of token i; its output predicts token
i + 2 and stands in for the features of token i + 1 when drafting goes on (arXiv 2401.15077, 2503.01840).
Rows are flat, [N, ...]; who sees whom is the caller's `attend`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, relu, silu

from sooner.errors import ModelError, unknown

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""query [N, H, D], key and value [N, KV, D], rotated already -> [N, H * D], of the rows that are kept."""

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_pytorch_tanh": lambda x: gelu(x, approximate="tanh"),
    "relu": relu,
}


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding: its base and, where positions are rescaled, by which rule (`kind`).

    factor: of "linear" and "llama3"; low, high, original: of "llama3".
    """

    base: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    original: int = 8192

    def __post_init__(self) -> None:
        if self.kind not in ("default", "linear", "llama3"):
            raise ModelError("the head's " + unknown("rope type", self.kind, ("default", "linear", "llama3")))
        if not self.base > 0 or not self.factor > 0:
            raise ModelError(f"rope base {self.base} and factor {self.factor} must be positive.")

    def frequencies(self, dim: int) -> Tensor:
        """float32 [dim / 2]: radians per position."""
        plain = self.base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        if self.kind == "linear":
            plain = plain / self.factor
        if self.kind == "llama3":
            turns = self.original * plain / (2 * torch.pi)
            keep = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
            plain = keep * plain + (1 - keep) * plain / self.factor
        return plain.float()


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """Everything that shapes the forward pass of a head.

    version: 1 (also EAGLE-2: the same weights) or 3. streams: how many of the target's streams are fused
    (3 for EAGLE-3, 1 for EAGLE-1). target_hidden: width of each. vocab: ids of the target; draft_vocab: ids
    the head's own LM head knows (EAGLE-1 uses the target's). bias: of the fusion. attention_bias: of q, k, v.
    fc_norm: each stream is normalised; norm_before_fc: all of them together; norm_before_residual: the
    residual is the normed feature; norm_output: what is fed back is normed.
    """

    version: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    draft_vocab: int
    target_hidden: int
    streams: int
    rope: Rope = Rope()
    eps: float = 1e-6
    act: str = "silu"
    bias: bool = False
    attention_bias: bool = False
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False

    def __post_init__(self) -> None:
        for name in ("hidden", "intermediate", "heads", "kv_heads", "head_dim", "vocab", "draft_vocab", "streams"):
            if getattr(self, name) < 1:
                raise ModelError(f"an EAGLE head needs {name} >= 1, got {getattr(self, name)}.")
        if self.version not in (1, 3):
            raise ModelError(f"EAGLE version {self.version} is not known; 1 (also 2) and 3 are.")
        if self.heads % self.kv_heads:
            raise ModelError(f"{self.heads} query heads cannot share {self.kv_heads} key heads evenly.")
        if self.act not in ACTIVATIONS:
            raise ModelError("the head's " + unknown("activation", self.act, ACTIVATIONS))
        if self.fc_norm and self.norm_before_fc:
            raise ModelError("fc_norm and norm_before_fc exclude each other.")
        if self.draft_vocab > self.vocab:
            raise ModelError(f"a draft vocabulary of {self.draft_vocab} ids does not fit into {self.vocab}.")

    @property
    def layer_width(self) -> int:
        """Width of what q, k and v read."""
        return 2 * self.hidden if self.version == 3 else self.hidden


class _Normed(torch.autograd.Function):
    """x / rms(x) * weight. Its own backward pass takes a third of the time of the recorded one on CPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        # Explicit operations take half the time of torch.rms_norm on CPU.
        wide = x if x.dtype == torch.float64 else x.float()
        scale = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
        unit = (wide * scale).to(x.dtype)
        ctx.save_for_backward(unit, scale.to(x.dtype), weight)
        return unit * weight

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor, None]:
        unit, scale, weight = ctx.saved_tensors
        inner = d_out * weight
        along = (inner * unit).mean(-1, keepdim=True)
        return (inner - unit * along) * scale, (d_out * unit).sum(0), None


class _Turned(torch.autograd.Function):
    """Rotary embedding of [N, heads, D] by (cos, sin) [N, 1, D / 2]; backwards it turns the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(d_out, cos, -sin), None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Norm(nn.Module):
    """Root-mean-square norm of rows [N, width], in float32 inside."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = _Normed.apply(x, self.weight, self.eps)  # type: ignore[no-untyped-call]  # torch's own
        return normed


class EagleHead(nn.Module):
    """The network of a head. Q, K and V are one product (`qkv`), gate and up another (`gate_up`).

    `head` is EAGLE-3's own LM head over draft ids; EAGLE-1 has none: its outputs are read by the target's.
    """

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        c = self.config = config
        wide, third = c.heads * c.head_dim, c.version == 3
        fused = c.streams * c.target_hidden
        self.fc = nn.Linear(fused if third else fused + c.hidden, c.hidden, bias=c.bias)
        self.qkv = nn.Linear(c.layer_width, wide + 2 * c.kv_heads * c.head_dim, bias=c.attention_bias)
        self.out = nn.Linear(wide, c.hidden, bias=False)
        self.gate_up = nn.Linear(c.hidden, 2 * c.intermediate, bias=False)
        self.down = nn.Linear(c.intermediate, c.hidden, bias=False)
        self.before_mlp = Norm(c.hidden, c.eps)
        count = c.streams if c.fc_norm else 0
        self.fc_norms = nn.ModuleList(Norm(c.target_hidden, c.eps) for _ in range(count))
        self.input_norm = Norm(fused, c.eps) if c.norm_before_fc else None
        self.token_norm = Norm(c.hidden, c.eps) if third else None
        self.feature_norm = Norm(c.hidden, c.eps) if third else None
        self.norm = Norm(c.hidden, c.eps) if third else None
        self.head = nn.Linear(c.hidden, c.draft_vocab, bias=False) if third else None
        self._act = ACTIVATIONS[c.act]
        self._frequencies = c.rope.frequencies(c.head_dim)

    def prepare(self, pack: Callable[[nn.Linear], Callable[[Tensor], Tensor]]) -> None:
        """Replace every linear map by what `pack` makes of it, for drafting."""
        for name in ("fc", "qkv", "out", "gate_up", "down", "head"):
            linear = getattr(self, name)
            if linear is not None:
                delattr(self, name)
                setattr(self, name, pack(linear))

    def fuse(self, features: Tensor) -> Tensor:
        """The target's streams [N, S, Ht] as the head takes them in: [N, h] (EAGLE-1: as they are)."""
        if self.config.version == 1:
            return features[:, 0]
        if self.fc_norms:
            joined = torch.cat([norm(features[:, i]) for i, norm in enumerate(self.fc_norms)], dim=-1)
        else:
            joined = features.flatten(1)
        if self.input_norm is not None:
            joined = self.input_norm(joined)
        fused: Tensor = self.fc(joined)
        return fused

    def rotary(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines [N, 1, D / 2] of slot positions, int64 [N]."""
        angles = (positions[:, None].float() * self._frequencies.to(positions.device))[:, None]
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def forward(
        self,
        embedded: Tensor,
        feature: Tensor,
        tables: tuple[Tensor, Tensor],
        attend: Attend,
        kept: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """One pass over slots: ([N, h] fed back as features of the next, [N, h] that the LM head reads).

        embedded: [N, h] of the slots' tokens. feature: [N, h], fused or fed back. tables: see `rotary`.
        kept: rows whose output is wanted, all by default; `attend` gives theirs alone, and sees the others.
        """
        x, residual = self._join(embedded, feature)
        if kept is not None:
            residual = residual.index_select(0, kept)
        x = residual + self._attention(x, tables, attend)
        gate, up = self.gate_up(self.before_mlp(x)).chunk(2, dim=-1)
        x = x + self.down(self._act(gate) * up)
        if self.norm is None:
            return x, x
        read = self.norm(x)
        return (read if self.config.norm_output else x), read

    def _join(self, embedded: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        if self.token_norm is None or self.feature_norm is None:
            x = self.fc(torch.cat([embedded, feature], dim=-1))  # the token first, then the feature
            return x, x
        normed = self.feature_norm(feature)
        joined = torch.cat([self.token_norm(embedded), normed], dim=-1)
        return joined, normed if self.config.norm_before_residual else feature

    def _attention(self, x: Tensor, tables: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        c = self.config
        parts = self.qkv(x).view(len(x), c.heads + 2 * c.kv_heads, c.head_dim)
        turn, value = parts.split([c.heads + c.kv_heads, c.kv_heads], dim=1)
        turn = _Turned.apply(turn, *tables)  # type: ignore[no-untyped-call]  # torch's own
        query, key = turn.split([c.heads, c.kv_heads], dim=1)
        result: Tensor = self.out(attend(query, key, value))
        return result
