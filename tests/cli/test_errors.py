"""Mistakes of the user: one line that says what is allowed, exit status 2, no traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

import sooner.cli.generate
from sooner.cli.options import in_options
from tests.cli.conftest import Sooner

WORD = "library "


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--k", -1), "--k must be a whole number from 0 to 64, got -1."),
        (("--k", 65), "--k must be a whole number from 0 to 64, got 65."),
        (("--width", 0), "--width must be a whole number from 1 to 64, got 0."),
        (("--max-tokens", 0), "--max-tokens must be at least 1, got 0."),
        (("--temperature", "nan"), "--temperature must be a finite number, 0 or more; got nan."),
        (("--temperature", "inf"), "--temperature must be a finite number, 0 or more; got inf."),
        (("--temperature", -1), "--temperature must be a finite number, 0 or more; got -1.0."),
        (("--top-p", 0), "--top-p must be"),
        (("--top-p", 1.5), "--top-p must be a finite number"),
        (("--top-k", -2), "--top-k must be at least -1, got -2."),
        (("--min-p", 2), "--min-p must be a finite number"),
        (("--seed", -1), f"--seed must be from 0 to {2**63 - 1}, got -1."),
        (("--stop", ""), "--stop takes up to 32 non-empty strings, got ('',)."),
        (("--logprobs", 21, "--json"), "--logprobs must be from 0 to 20, got 21."),
        (("--logprobs", 1), "--logprobs are shown with --json only; add --json."),
        (("--rule", "mach"), "unknown rule 'mach'. Did you mean 'match'?"),
        (("--dtype", "float23"), "unknown dtype 'float23'. Did you mean 'float32'?"),
        (("--device", "toaster"), "--device 'toaster' is not one torch knows; use auto, cpu or cuda."),
        (("--draft", "lokup"), "unknown draft 'lokup'. Did you mean 'lookup'? Allowed: "),
        (
            ("--draft", "self:int2"),
            "draft 'self' needs the bits of its copy of the target: ",
        ),
        (("--draft", "early-exit:9"), "draft early-exit:9 needs a number from 1 to 1: the target has 2 layers."),
        (("--quantize", "int9"), "unknown quantize 'int9'. Did you mean 'int8'? Allowed: int4, int8."),
        (
            ("--quantize", "int8", "--runtime", "hf"),
            "--quantize int8 needs runtime native or fused",
        ),
        (("--draft", "lookup:3"), "draft 'lookup' takes no argument, got '3'."),
        (("--draft", "model"), "draft 'model' needs a model: write model:FOLDER or model:NAME."),
        (("--draft", "model:"), "draft 'model' needs a model: write model:FOLDER or model:NAME."),
        (("--draft", "model:./nowhere"), "unknown model './nowhere'."),
        (("--temprature", 1), "No such option: --temprature"),
        (("--k", "many"), "Invalid value for '--k'"),
        (("and", "more"), "Got unexpected extra argument"),
    ],
    ids=str,
)
def test_an_option_out_of_range_is_named(
    sooner: Sooner, tiny: Path, arguments: tuple[object, ...], expected: str
) -> None:
    assert sooner("generate", "hello", "--model", tiny, *arguments).complaint.startswith(expected)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ("generate", "hello", "--model", "smollm2-135"),
            "unknown model 'smollm2-135'. Did you mean 'smollm2-135m'?",
        ),
        (("generate", "hello", "--model", "./nowhere"), "unknown model './nowhere'. Allowed: smollm2-135m."),
        (("generate", ""), "the prompt is empty: give some text, or - to read it from standard input."),
        (("generate", "lone \ud800 half"), "the prompt is not UTF-8 text."),
        (("generate",), "Missing argument 'PROMPT'. Try: sooner generate --help"),
        (("genrate", "hello"), "No such command 'genrate'. Did you mean 'generate'? Try: sooner --help"),
        (("--verbose",), "No such option: --verbose"),
        (("pull", "smollm3"), "unknown packaged model 'smollm3'. Did you mean 'smollm2-135m'?"),
        (("bench",), "Missing option '--trace'. Try: sooner bench --help"),
    ],
    ids=str,
)
def test_a_mistake_is_one_line(sooner: Sooner, arguments: tuple[str, ...], expected: str) -> None:
    assert sooner(*arguments).complaint.startswith(expected)


def test_an_unknown_option_comes_with_the_closest_one(sooner: Sooner) -> None:
    assert "--temperature" in sooner("generate", "hello", "--temprature", 1).complaint


def test_a_folder_that_is_no_model_is_refused_by_name(sooner: Sooner, tmp_path: Path) -> None:
    said = sooner("generate", "hello", "--model", tmp_path).complaint
    assert said == f"{tmp_path} is a folder without config.json: not a transformers model."


def test_a_damaged_model_is_refused_by_name(sooner: Sooner, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    assert sooner("generate", "hello", "--model", tmp_path).complaint.startswith(f"model '{tmp_path}' could not")


def test_a_prompt_longer_than_the_context_is_refused_with_both_lengths(sooner: Sooner, tiny: Path) -> None:
    said = sooner("generate", WORD * 300, "--model", tiny, "--raw").complaint
    assert "this model's context is 256" in said
    assert "at most 255" in said


def test_without_a_command_there_is_help(sooner: Sooner) -> None:
    ended = sooner()
    assert ended.status == 0
    assert all(verb in ended.out for verb in ("generate", "bench", "pull"))


def test_the_version_is_that_of_the_package(sooner: Sooner) -> None:
    from sooner import __version__

    assert sooner("--version").out == f"sooner {__version__}\n"


def test_a_bug_is_not_dressed_up_as_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    def bug(prompt: str) -> str:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(sooner.cli.generate, "read_prompt", bug)
    with pytest.raises(ZeroDivisionError):
        sooner.cli.main.run(["generate", "hello"])


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("max_tokens must be at least 1, got 0.", "--max-tokens must be at least 1, got 0."),
        ("k must be small.", "--k must be small."),
        ("kind is wrong.", "kind is wrong."),
        ("", ""),
    ],
)
def test_only_a_parameter_at_the_beginning_becomes_an_option(message: str, expected: str) -> None:
    assert in_options(message) == expected
