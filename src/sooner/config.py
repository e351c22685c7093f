"""How the engine is set up, and the budget of one draft. Knows nothing of models or requests."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from sooner.errors import ConfigError

MAX_K = 64


@dataclass(frozen=True, slots=True)
class Budget:
    """How much one request may guess in one step: longest path, most children a node, nodes in all.

    Zero nodes or depth means: do not draft. `Budget.chain(k)` is a plain chain of up to k tokens.
    """

    depth: int
    width: int
    nodes: int

    def __post_init__(self) -> None:
        for name in ("depth", "width", "nodes"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ConfigError(f"budget {name} must be a whole number, 0 or more, got {value!r}.")

    @staticmethod
    def chain(k: int) -> Budget:
        return Budget(depth=k, width=1, nodes=k)

    def within(self, depth: int, nodes: int) -> Budget:
        """The same budget, no deeper than `depth` and no larger than `nodes` (negative counts as 0)."""
        if depth >= self.depth and nodes >= self.nodes:
            return self
        return Budget(min(self.depth, max(depth, 0)), self.width, min(self.nodes, max(nodes, 0)))

    @property
    def empty(self) -> bool:
        return self.depth == 0 or self.nodes == 0 or self.width == 0


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Limits of the engine.

    max_requests: requests in flight at once; each holds one lane of keys and values.
    step_rows: most rows (prompt tokens, root and draft nodes together) in one pass of the target.
    chunk_rows: most rows of one prompt in one pass.
    kv_memory: most bytes for keys and values, of target and drafter together; None = as much as is needed.
        When it is short a request has to make room for those before it, and resumes later with the same text.
    reuse_prefixes: a request that begins like another one (of the same `cache_salt`) takes over what that one has
        computed.
    """

    max_requests: int = 16
    step_rows: int = 1024
    chunk_rows: int = 512
    kv_memory: int | None = None
    reuse_prefixes: bool = True

    def __post_init__(self) -> None:
        for name in ("max_requests", "step_rows", "chunk_rows", "kv_memory"):
            value = getattr(self, name)
            if name == "kv_memory" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be a whole number, at least 1, got {value!r}.")
        if not isinstance(self.reuse_prefixes, bool):
            raise ConfigError(f"reuse_prefixes must be true or false, got {self.reuse_prefixes!r}.")
        if self.step_rows < self.max_requests:
            raise ConfigError(
                f"step_rows ({self.step_rows}) must be at least max_requests ({self.max_requests}): "
                "every running request needs one row a step."
            )


_UNITS = {"": 1, "b": 1, "k": 2**10, "kib": 2**10, "m": 2**20, "mib": 2**20, "g": 2**30, "gib": 2**30}


def parse_bytes(name: str, text: str) -> int:
    """Bytes written as "512MiB", "2GiB", "2g" or a plain number. Raises ConfigError naming the option."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if found is None or found[2] not in _UNITS or float(found[1]) * _UNITS[found[2]] < 1:
        raise ConfigError(f"{name} must be a size like 512MiB or 2GiB, got {text!r}.")
    return int(float(found[1]) * _UNITS[found[2]])


def with_kv_memory(config: EngineConfig | None, size: int | str | None) -> EngineConfig | None:
    """The configuration with another limit of memory, bytes or as `parse_bytes` takes them; None = as it is."""
    if size is None:
        return config
    most = parse_bytes("kv_memory", size) if isinstance(size, str) else size
    return replace(config or EngineConfig(), kv_memory=most)
