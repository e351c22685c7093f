"""What the README tells a reader to type works: its scripts, its commands, its Python."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
SOONER = [sys.executable, "-m", "sooner"]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done


def test_the_first_screen_holds_exactly_two_commands() -> None:
    first = README.split("## ")[0]
    assert re.findall(r"^    (\S+)", first, flags=re.MULTILINE) == ["scripts/demo", "scripts/test"]
    for script in ("scripts/demo", "scripts/test", "scripts/lint", ".ci/run"):
        assert os.access(ROOT / script, os.X_OK), script
    assert "scripts/test" in (ROOT / ".ci/run").read_text()


def test_the_demo_answers_and_says_how_fast() -> None:
    done = run(["scripts/demo"])
    assert "borrow up to five books" in done.stdout
    assert re.search(r"\d+ tokens, [\d.]+ tok/s, [\d.]+ tokens per step", done.stdout + done.stderr)


@pytest.fixture(scope="module")
def lines() -> list[list[str]]:
    return [shlex.split(line)[1:] for line in blocks("bash")[0].splitlines() if line.startswith("sooner ")]


def test_every_command_of_the_readme_is_run(lines: list[list[str]], tmp_path: Path, tiny: Path) -> None:
    trace = tmp_path / "questions.jsonl"
    rows = [{"question_id": i, "category": "qa", "turns": [f"Say {i} twice."]} for i in range(2)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    named = {"./my-model": str(tiny), "model:./my-small-model": f"model:{tiny}", "questions.jsonl": str(trace)}
    assert len(lines) == 5
    for line in lines:
        command = [named.get(word, word) for word in line]
        limit = [] if "--max-tokens" in command else ["--max-tokens", "8"]
        assert run([*SOONER, *command, *limit]).stdout.strip()


def test_the_python_of_the_readme_runs() -> None:
    run([sys.executable, "-c", "\n".join(blocks("python"))])


def test_the_drafter_of_the_docs_runs_and_keeps_the_protocol() -> None:
    code = re.findall(r"```python\n(.*?)```", (ROOT / "docs/drafters.md").read_text(), flags=re.DOTALL)
    more = 'print(llm.chat("Hi", sooner.SamplingParams(max_tokens=8)).stats.draft_failures)'
    assert run([sys.executable, "-c", "\n".join([*code, more])]).stdout.strip().endswith("0")


def test_documents_name_files_that_exist() -> None:
    for page in ("README.md", "ARCHITECTURE.md", "docs/drafters.md", "docs/cli.md"):
        text = (ROOT / page).read_text()
        for link in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (ROOT / page).parent.joinpath(link).exists(), f"{page} links to {link}"
        for name in re.findall(r"`((?:src|docs|benchmarks|scripts|tests)/[\w./-]+)`", text):
            assert (ROOT / name).exists(), f"{page} names {name}"
