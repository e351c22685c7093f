"""EAGLE as its reference describes it, slowly: every guess recomputes the whole text. Knows none of our code.

Slot i joins token i + 1 with the features of token i, at rotary position i; behind the text slot i joins the
guess with what slot i - 1 put out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu


class Slow:
    """settings, tensors: as in the files (either layout). embedding, head: the target's. Float64."""

    def __init__(
        self, settings: Mapping[str, Any], tensors: Mapping[str, Tensor], embedding: Tensor, head: Tensor
    ) -> None:
        self.c = dict(settings.get("transformer_layer_config", {})) | dict(settings)
        self.w = {
            name.replace("midlayer.", "layers.0."): tensor.double() if tensor.is_floating_point() else tensor
            for name, tensor in tensors.items()
        }
        self.third = "norm.weight" in self.w
        self.embedding = self.w.get("embed_tokens.weight", embedding.double())
        self.target_head = head.double()

    def norm(self, x: Tensor, name: str) -> Tensor:
        scale = 1 / math.sqrt(float((x * x).mean()) + self.c["rms_norm_eps"])
        return x * scale * self.w[name]

    def linear(self, x: Tensor, name: str) -> Tensor:
        return self.w[f"{name}.weight"] @ x + self.w.get(f"{name}.bias", torch.tensor(0.0))

    def fuse(self, streams: Tensor) -> Tensor:
        """[S, Ht] -> [h]."""
        if not self.third:
            return streams[0]
        if "fc_norm.0.weight" in self.w:
            streams = torch.stack([self.norm(s, f"fc_norm.{i}.weight") for i, s in enumerate(streams)])
        joined = streams.reshape(-1)
        if "input_norm.weight" in self.w:
            joined = self.norm(joined, "input_norm.weight")
        return self.linear(joined, "fc")

    def rotate(self, x: Tensor, position: int) -> Tensor:
        """[heads, D]: pairs are (i, i + D / 2)."""
        half = x.shape[-1] // 2
        out = x.clone()
        for i in range(half):
            angle = position * self.c.get("rope_theta", 10000.0) ** (-2 * i / x.shape[-1])
            out[:, i] = x[:, i] * math.cos(angle) - x[:, i + half] * math.sin(angle)
            out[:, i + half] = x[:, i + half] * math.cos(angle) + x[:, i] * math.sin(angle)
        return out

    def slot(self, token: int, feature: Tensor, position: int, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """The state after one slot; its key and value join the others."""
        embedded = self.embedding[token]
        if self.third:
            normed = self.norm(feature, "layers.0.hidden_norm.weight")
            x = torch.cat([self.norm(embedded, "layers.0.input_layernorm.weight"), normed])
            residual = normed if self.c.get("norm_before_residual") else feature
        else:
            x = residual = self.linear(torch.cat([embedded, feature]), "fc")
        heads, kv = self.c["num_attention_heads"], self.c["num_key_value_heads"]
        q, k, v = (self.linear(x, f"layers.0.self_attn.{n}_proj") for n in "qkv")
        q, k, v = q.view(heads, -1), k.view(kv, -1), v.view(kv, -1)
        q, k = self.rotate(q, position), self.rotate(k, position)
        keys.append(k)
        values.append(v)
        seen = []
        for h in range(heads):
            g = h // (heads // kv)
            scores = torch.stack([q[h] @ key[g] for key in keys]) / math.sqrt(q.shape[-1])
            seen.append((scores.softmax(0)[:, None] * torch.stack([value[g] for value in values])).sum(0))
        x = residual + self.linear(torch.cat(seen), "layers.0.self_attn.o_proj")
        m = self.norm(x, "layers.0.post_attention_layernorm.weight")
        gate, up = self.linear(m, "layers.0.mlp.gate_proj"), self.linear(m, "layers.0.mlp.up_proj")
        return x + self.linear(silu(gate) * up, "layers.0.mlp.down_proj")

    def logs(self, tokens: Sequence[int], features: Tensor, guess: Sequence[int]) -> dict[int, float]:
        """Log-probability of each target id after tokens + guess. features: [len(tokens) - 1, S, Ht]."""
        keys: list[Tensor] = []
        values: list[Tensor] = []
        state = torch.empty(0)
        for i in range(len(tokens) - 1):
            state = self.slot(tokens[i + 1], self.fuse(features[i].double()), i, keys, values)
        for j, token in enumerate(guess):
            fed = self.norm(state, "norm.weight") if self.c.get("norm_output") else state
            state = self.slot(token, fed, len(tokens) - 1 + j, keys, values)
        if not self.third:
            logs = torch.log_softmax(self.target_head @ state, 0)
            return dict(enumerate(logs.tolist()))
        logs = torch.log_softmax(self.linear(self.norm(state, "norm.weight"), "lm_head"), 0)
        offsets = self.w.get("d2t", torch.zeros(len(logs), dtype=torch.int64)).tolist()
        return {d + offsets[d]: log for d, log in enumerate(logs.tolist())}

    def tree(
        self, tokens: Sequence[int], features: Tensor, *, depth: int, width: int, beams: int, nodes: int
    ) -> dict[tuple[int, ...], float]:
        """EAGLE-2: paths of the `nodes` best nodes and the log-probability of each path."""
        scored: dict[tuple[int, ...], float] = {}
        front = {(): 0.0}
        for _ in range(depth):
            below = {}
            for path, score in front.items():
                logs = self.logs(tokens, features, path)
                best = sorted(logs, key=lambda t: -logs[t])[: min(width, beams)]
                below |= {(*path, t): score + logs[t] for t in best}
            scored |= below
            kept = sorted(below, key=lambda p: -below[p])[: 1 if width == 1 else beams]
            front = {path: below[path] for path in kept}
        best_nodes = sorted(scored, key=lambda p: -scored[p])[:nodes]
        return {path: scored[path] for path in best_nodes}
