"""The import table of ARCHITECTURE.md, and the habits a reader may rely on, executed."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "sooner"
FILES = sorted(SOURCE.rglob("*.py"))

# Who may import whom: package or module under sooner -> what it may name. Leaves may be named by all but core.
LEAVES = {"errors", "params", "config", "structured", "cache"}
TABLE: dict[str, set[str]] = {
    "errors": set(),
    "cache": set(),
    "params": {"errors", "structured"},
    "structured": {"errors"},
    "config": {"errors"},
    "native": {"native"},
    "core": {"core", "native"},
    "model": {"model", "core", "native"},
    "heads": {"heads"},
    # model.linear, model.quantize: the heads' weights are packed and made smaller as the target's are.
    "draft": {
        "draft",
        "heads",
        "model.protocol",
        "model.lanes",
        "model.linear",
        "model.quantize",
        "core",
        "native.eagle",
        "native.joined",
    },
    # llm: the target writes its own text. draft: a warm table is tried by the sources that read it.
    "train": {"train", "heads", "model", "llm", "draft", "core"},
    "control": {"control", "native.control", "native.filter", "native.belief", "native.price"},
    "engine": {"engine", "control", "draft.protocol", "model.protocol", "model.lanes", "core", "native.law"},
    "shipped": {"draft.registry"},
    "budgets": set(),
    "llm": {
        "engine",
        "model.load",
        "model.protocol",
        "model.pull",
        "model.threads",
        "shipped",
        "budgets",
        "draft.registry",
        "draft.protocol",
        "draft.translate",
        "control",
    },
    "measure": {
        "measure",
        "llm",
        "engine",
        "control",
        "testing",
        "model.plain",
        "model.load",
        "model.pull",
        "model.protocol",
        "core",
    },
    "cli": {"cli", "measure", "train", "llm", "draft.table", "model.load", "model.pull", "model.protocol"},
    "integrations": {
        "integrations",
        "shipped",
        "budgets",
        "llm",
        "engine",
        "control",
        "draft",
        "model.borrowed",
        "model.load",
        "model.protocol",
        "core",
    },
    "testing": {"engine.guard", "draft.protocol", "model", "core"},
    "__init__": {"llm", "engine", "draft.protocol", "core", "integrations.transformers"},
    "__main__": {"cli"},
}
# Third-party packages each part may import, beyond the standard library.
OUTSIDE: dict[str, set[str]] = {
    "core": {"torch"},
    "native": {"torch", "numpy"},
    "control": {"numpy"},
    "heads": {"torch", "safetensors"},
    "draft": {"torch", "numpy", "numba", "safetensors"},
    "train": {"torch", "safetensors", "matplotlib"},
    "engine": {"torch", "tokenizers", "xgrammar", "llguidance"},
    "model": {"torch", "transformers", "tokenizers", "safetensors", "huggingface_hub"},
    "measure": {"torch", "rich", "matplotlib"},
    "integrations": {"torch", "transformers", "lm_eval"},
    "cli": {"typer", "rich", "click"},
    "testing": {"torch"},
}
TORCH_FREE = ("engine/scheduler.py", "engine/stop.py", "engine/stats.py", "engine/request.py", "control/fixed.py")


def part_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    """Every module a file names in an import, wherever in the file."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} uses a relative import"
            assert node.module is not None
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_a_file_imports_only_what_the_table_allows(path: Path) -> None:
    part = part_of(path)
    allowed = TABLE[part] | (LEAVES if part != "core" else set())
    for name in imports(path):
        if name.split(".")[0] == "sooner":
            inner = name.removeprefix("sooner").removeprefix(".") + "."
            assert any(inner.startswith(a + ".") for a in allowed), f"{part} must not import {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_a_file_uses_only_the_libraries_of_its_part(path: Path) -> None:
    import sys

    allowed = OUTSIDE.get(part_of(path), set())
    for name in imports(path):
        top = name.split(".")[0]
        if top != "sooner" and top not in sys.stdlib_module_names:
            assert top in allowed, f"{path.relative_to(SOURCE)} must not import {top}"


@pytest.mark.parametrize("name", TORCH_FREE)
def test_deciding_who_runs_and_when_a_text_ends_needs_no_tensors(name: str) -> None:
    assert not any(module.split(".")[0] == "torch" for module in imports(SOURCE / name))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_a_file_is_short_and_says_what_it_is(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 400
    first = (ast.get_docstring(ast.parse(text)) or "").splitlines()
    assert first, f"{path} has no docstring"
    assert first[0].endswith("."), f"{path}: the first line is a sentence"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_no_state_is_global(path: Path) -> None:
    assert not any(isinstance(node, ast.Global) for node in ast.walk(ast.parse(path.read_text())))


def test_the_table_knows_every_part() -> None:
    assert {part_of(path) for path in FILES} <= set(TABLE)


def test_the_table_has_teeth(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("from sooner.engine.engine import Engine\nimport transformers.models\n")
    names = imports(bad)
    assert names == {"sooner.engine.engine.Engine", "transformers.models"}
    assert not any(("engine.engine.Engine" + ".").startswith(a + ".") for a in TABLE["core"])
