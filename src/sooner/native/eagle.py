"""Python's side of eagle.c: a head's weights, and drafts of many requests in one call. Knows no text."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from ctypes import Structure, c_double, c_int64, c_void_p
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from sooner.native import build
from sooner.native.decoder import LANES, Layer, Linear, Model, Packer, Panels, Room, in_turn, whole_panels

_ANGLES = 1024  # positions that the rotary table grows by


class _Head(Structure):
    _fields_ = [
        ("body", Model),
        ("fc", Linear),
        *((name, c_void_p) for name in ("stream_norm", "input_norm", "token_norm", "feature_norm", "ids")),
        *((name, c_int64) for name in ("streams", "width", "normed_residual", "norm_output")),
    ]


class _Job(Structure):
    _fields_ = [
        *((n, c_int64) for n in ("requests", "fresh", "beams", "threads", "angles", "lanes", "capacity", "most")),
        ("least", c_double),
        *((n, c_void_p) for n in ("lane", "held", "made", "first", "depth", "width", "nodes")),
        *((n, c_void_p) for n in ("token", "features", "cos", "sin", "store")),
        *((n, c_void_p) for n in ("size", "tokens", "parents", "scores", "scratch")),
    ]


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a head and its switches, as heads/eagle.py means them. vocab: ids of its LM head."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    dim: int
    vocab: int
    streams: int
    width: int
    eps: float
    normed_residual: bool
    norm_output: bool
    gelu: bool


@dataclass(frozen=True, slots=True)
class Weights:
    """Of a head: a map is (weight, bias) or a weight. norm, token_norm, feature_norm: None for EAGLE-1."""

    fc: tuple[Tensor, Tensor | None]
    qkv: tuple[Tensor, Tensor | None]
    out: Tensor
    gate_up: Tensor
    down: Tensor
    head: Tensor
    embedding: Tensor
    before_mlp: Tensor
    norm: Tensor | None
    token_norm: Tensor | None
    feature_norm: Tensor | None
    stream_norm: Tensor | None
    input_norm: Tensor | None
    ids: Tensor | None


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: its lane, slots it holds, tokens of the true slots to make.

    first: the place in the text of its first slot. depth 0: slots alone, no draft.
    """

    lane: int
    held: int
    tokens: Sequence[int]
    first: int
    depth: int = 0
    width: int = 0
    nodes: int = 0


@dataclass(frozen=True, slots=True)
class Found:
    """The best nodes of a request, parents (-1 = the root) first, with log-probabilities of their paths."""

    tokens: list[int]
    parents: list[int]
    scores: list[float]


def serves(shape: Shape, dtype: torch.dtype) -> bool:
    """Whether a head of these sizes can be run, and whether there is a compiler on this machine."""
    unit = 2 if dtype == torch.bfloat16 else 1
    return (
        dtype in (torch.bfloat16, torch.float32)
        and not any(size % LANES for size in (shape.hidden, shape.inner, shape.width))
        and shape.dim % (LANES * unit) == 0
        and _library(dtype) is not None
    )


class NativeHead:
    """A head ready to draft. frequencies: float32 [dim / 2], radians a place. beams, least: see EagleDrafter.
    smaller: of a weight whose rows are whole panels, what it is at fewer bits; None = weights as they are."""

    def __init__(
        self, shape: Shape, weights: Weights, frequencies: Tensor, beams: int, least: float,
        smaller: Callable[[Tensor], Panels] | None = None,
    ) -> None:  # fmt: skip
        self._beams, self._least, self._frequencies = beams, least, frequencies
        self._packer, self._room = Packer(), Room()
        self._angles = torch.empty((2, 0, shape.dim))
        w, s, kind = weights, shape, weights.embedding.dtype
        self._smaller = smaller
        self._layer = (Layer * 1)(
            Layer(
                qkv=self._linear(*w.qkv, kind),
                o=self._linear(w.out, None, kind),
                gate_up=self._linear(in_turn(w.gate_up, s.inner), None, kind),
                down=self._linear(w.down, None, kind),
                before_mlp=self._norm(w.before_mlp),
                scale=s.dim**-0.5,
            )
        )
        body = Model(
            layers=1, hidden=s.hidden, heads=s.heads, kv_heads=s.kv_heads, dim=s.dim, inner=s.inner,
            vocab=s.vocab, gelu=s.gelu, rotary=s.dim, eps=s.eps, embed_scale=1.0,
            embed=self._packer.keep(w.embedding), norm=self._norm(w.norm),
            head=self._linear(w.head, None, kind), layer=self._layer,
        )  # fmt: skip
        self._head = _Head(
            body=body, fc=self._linear(*w.fc, kind), stream_norm=self._norm(w.stream_norm),
            input_norm=self._norm(w.input_norm), token_norm=self._norm(w.token_norm),
            feature_norm=self._norm(w.feature_norm), ids=None if w.ids is None else self._packer.keep(w.ids),
            streams=s.streams, width=s.width, normed_residual=s.normed_residual, norm_output=s.norm_output,
        )  # fmt: skip

    def columns(self, asked: Asked) -> int:
        """Columns after those held that a request's slots and guesses need."""
        return len(asked.tokens) + max(asked.depth - 1, 0) * (1 if asked.width == 1 else self._beams)

    def draft(self, asked: Sequence[Asked], features: Tensor, store: Tensor) -> list[Found]:
        """Makes true slots of `features` [tokens of all, streams, width], and drafts after the last of each.

        store: [1, 2, lanes, kv_heads, capacity, dim], where each lane has room for its `columns`.
        """
        library, count = _library(store.dtype), len(asked)
        most = max((a.nodes for a in asked), default=0)
        each = zip(
            *((a.lane, a.held, len(a.tokens), a.first, a.depth, a.width, a.nodes) for a in asked), strict=True
        )
        told = array("q", chain(*each, *(a.tokens for a in asked)))
        wrote, scores = array("q", bytes(8 * count * (1 + 2 * most))), array("f", bytes(4 * count * most))
        cos_sin = self._rotary(max(a.first + a.held + len(a.tokens) + a.depth for a in asked))
        read, write = told.buffer_info()[0], wrote.buffer_info()[0]
        lane, held, made, first, depth, width, nodes, token = (read + 8 * count * i for i in range(8))
        job = _Job(
            requests=count, fresh=len(features), beams=self._beams, threads=torch.get_num_threads(),
            angles=cos_sin.shape[1], lanes=store.shape[2], capacity=store.shape[4], most=most, least=self._least,
            lane=lane, held=held, made=made, first=first, depth=depth, width=width, nodes=nodes, token=token,
            features=features.data_ptr(), cos=cos_sin.data_ptr(), sin=cos_sin.data_ptr() + 2 * cos_sin.numel(),
            store=store.data_ptr(), size=write, tokens=write + 8 * count, parents=write + 8 * count * (1 + most),
            scores=scores.buffer_info()[0],
        )  # fmt: skip
        job.scratch = self._room.at(library.draft_bytes(ctypes.byref(self._head), ctypes.byref(job)))
        library.draft(ctypes.byref(self._head), ctypes.byref(job))
        tokens, parents = wrote[count : count * (1 + most)], wrote[count * (1 + most) :]
        ends = [(i * most, i * most + wrote[i]) for i in range(count)]
        return [Found(tokens[a:b].tolist(), parents[a:b].tolist(), scores[a:b].tolist()) for a, b in ends]

    def _linear(self, weight: Tensor, bias: Tensor | None, kind: torch.dtype) -> Linear:
        if self._smaller is None:
            return self._packer.linear(weight, bias, kind)
        out, inputs = weight.shape
        return self._packer.fewer(self._smaller(whole_panels(weight.to(kind))), bias, (out, inputs), kind)

    def _norm(self, weight: Tensor | None) -> int | None:
        return None if weight is None else self._packer.keep(weight.float())

    def _rotary(self, need: int) -> Tensor:
        """[2, positions, dim]: cosines and sines of at least `need` positions."""
        if self._angles.shape[1] < need:
            positions = torch.arange(-(-need // _ANGLES) * _ANGLES)
            angles = (positions[:, None].float() * self._frequencies).repeat(1, 2)
            self._angles = torch.stack([angles.cos(), angles.sin()])
        return self._angles


def _library(dtype: torch.dtype) -> Any:
    """The compiled drafting for a dtype, its signatures told, or None."""
    made = build.library("eagle.c", f"BF16={int(dtype == torch.bfloat16)}")
    if made is None:
        return None
    made.draft_bytes.restype = made.draft_struct_bytes.restype = c_int64
    made.draft.restype = None
    for structure, which in ((_Head, 0), (_Job, 1)):
        if made.draft_struct_bytes(c_int64(which)) != ctypes.sizeof(structure):
            raise RuntimeError(f"{structure.__name__} is laid out otherwise in C")
    return made
