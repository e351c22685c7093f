"""`sooner generate`: the same text on every road, and nothing but the text on standard output."""

from __future__ import annotations

import io
import json
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sooner.cli.terminal import printable
from sooner.llm import LLM, Chunk
from sooner.params import SamplingParams
from tests.cli.conftest import Ended, Sooner
from tests.tiny import make_tiny

PROMPT = "the library opened at nine, the library"
GREEN = "\x1b[32m"


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft model that mostly guesses wrong."""
    return make_tiny(tmp_path_factory.mktemp("other"), seed=9)


@pytest.fixture
def generate(sooner: Sooner, tiny: Path) -> Sooner:
    def call(*arguments: object, prompt: str = PROMPT) -> Ended:
        return sooner("generate", prompt, "--model", tiny, "--dtype", "float32", "--max-tokens", 40, *arguments)

    return call


def values(ended: Ended) -> dict[str, Any]:
    """The JSON object of the last line."""
    assert ended.status == 0, ended.err
    found: dict[str, Any] = json.loads(ended.out.splitlines()[-1])
    return found


def test_json_tells_everything_and_nothing_by_accident(generate: Sooner, tiny: Path) -> None:
    found = values(generate("--json", "--k", 8))
    assert set(found) == {"model", "draft", "text", "token_ids", "prompt_tokens", "finish_reason", "stats"}
    assert (found["model"], found["draft"], found["finish_reason"]) == (str(tiny), "auto", "length")
    assert len(found["token_ids"]) == 40
    assert found["stats"]["emitted"] == 40
    assert found["stats"]["steps"] < 40
    assert {"drafted", "accepted", "acceptance", "tokens_per_step", "prompt_s", "decode_s", "tok_s"} <= set(
        found["stats"]
    )


@pytest.mark.parametrize("sampling", [(), ("--temperature", 0.9, "--seed", 5), ("--temperature", 2, "--seed", 6)])
def test_no_draft_changes_the_text(generate: Sooner, tiny: Path, other: Path, sampling: tuple[object]) -> None:
    plain = values(generate("--json", "--draft", "none", *sampling))
    assert plain["stats"]["drafted"] == 0
    roads: list[tuple[object, ...]] = [
        ("--draft", "lookup"),
        ("--draft", "lookup", "--k", 0),
        ("--draft", "lookup", "--k", 1),
        ("--draft", "lookup", "--k", 4, "--width", 3),
        ("--draft", f"model:{tiny}"),
        ("--draft", f"model:{other}", "--k", 3),
    ]
    for road in roads:
        found = values(generate("--json", *road, *sampling))
        assert (found["token_ids"], found["text"]) == (plain["token_ids"], plain["text"]), road


def test_a_seed_repeats_and_another_seed_differs(generate: Sooner) -> None:
    first, again, other = (values(generate("--json", "--temperature", 1.5, "--seed", s)) for s in (1, 1, 2))
    assert first["token_ids"] == again["token_ids"] != other["token_ids"]


@pytest.mark.parametrize("sampling", [(), ("--temperature", 1.0, "--seed", 3)])
def test_the_streamed_text_is_the_text_of_the_json(generate: Sooner, sampling: tuple[object]) -> None:
    text = values(generate("--json", *sampling))["text"]
    assert generate(*sampling).out == (text if text.endswith("\n") else text + "\n")


def test_standard_output_is_the_text_alone_and_the_closing_line_goes_to_stderr(generate: Sooner) -> None:
    ended = generate("--k", 4)  # unasked, it may find that guesses do not pay
    assert "\x1b[" not in ended.out + ended.err
    assert "tok/s" not in ended.out
    closing = ended.err.splitlines()[-1]
    assert closing.startswith("40 tokens, ")
    assert "tok/s" in closing
    assert "tokens per step" in closing
    assert "drafted tokens accepted" in closing
    assert "green" not in closing


def test_one_token_is_not_called_tokens_and_has_no_speed(generate: Sooner) -> None:
    closing = generate("--max-tokens", 1).err.splitlines()[-1]
    assert closing == "1 token, 1.00 tokens per step"


def test_raw_skips_the_chat_template(generate: Sooner, tiny: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    chat, raw = values(generate("--json")), values(generate("--json", "--raw"))
    assert raw["prompt_tokens"] == len(tokenizer(PROMPT)["input_ids"])
    assert chat["prompt_tokens"] == len(tokenizer(f"<|user|>{PROMPT}\n<|answer|>")["input_ids"])
    assert chat["token_ids"] != raw["token_ids"]


def test_a_stop_string_ends_the_text_before_it(generate: Sooner) -> None:
    whole = values(generate("--json"))["text"]
    stop = whole[10:12]
    found = values(generate("--json", "--stop", "never in the text", "--stop", stop))
    assert found["text"] == whole[: whole.index(stop)]
    assert found["finish_reason"] == "stop"


def test_an_end_of_text_token_is_in_the_ids_but_not_in_the_text(
    sooner: Sooner, generate: Sooner, tmp_path: Path
) -> None:
    ids = values(generate("--json"))["token_ids"]
    ending = make_tiny(tmp_path / "ending", seed=0, eos=[ids[20], 319])
    arguments = ("--dtype", "float32", "--max-tokens", 40, "--json")
    found = values(sooner("generate", PROMPT, "--model", ending, *arguments))
    cut = ids.index(ids[20]) + 1
    assert found["token_ids"] == ids[:cut]
    assert found["finish_reason"] == "stop"
    assert found["text"] == AutoTokenizer.from_pretrained(ending).decode(ids[: cut - 1])


@pytest.mark.parametrize("draft", ["none", "lookup"])
def test_logprobs_name_every_token_and_its_rivals(generate: Sooner, draft: str) -> None:
    found = values(generate("--json", "--draft", draft, "--logprobs", 2))
    assert [entry["id"] for entry in found["logprobs"]] == found["token_ids"]
    for entry in found["logprobs"]:
        assert [set(rival) for rival in entry["top"]] == [{"id", "text", "logprob"}] * 2
        assert entry["top"][0]["id"] == entry["id"]  # greedy: the likeliest is the one
        assert entry["top"][0]["logprob"] == entry["logprob"] <= 0


def test_a_prompt_can_come_from_standard_input(generate: Sooner, monkeypatch: pytest.MonkeyPatch) -> None:
    given = values(generate("--json"))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(PROMPT.encode() + b"\n")))
    assert values(generate("--json", prompt="-"))["token_ids"] == given["token_ids"]


def test_standard_input_that_is_not_text_is_refused(generate: Sooner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9 au lait")))
    assert generate(prompt="-").complaint == "the prompt is not UTF-8 text: invalid continuation byte at byte 3."


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C after the third piece of the stream."""
    stream = LLM.stream

    def stopping(*arguments: Any) -> Iterator[Chunk]:
        for count, chunk in enumerate(stream(*arguments)):
            if count == 3:
                signal.raise_signal(signal.SIGINT)
            yield chunk

    monkeypatch.setattr(LLM, "stream", stopping)


@pytest.mark.usefixtures("interrupted")
def test_ctrl_c_leaves_what_was_written_and_exits_130(generate: Sooner, tiny: Path) -> None:
    ended = generate("--draft", "none")
    written = LLM(str(tiny), "none", dtype="float32").chat(PROMPT).text
    assert ended.status == 130
    assert written.startswith(ended.out.removesuffix("\n"))
    assert ended.err.splitlines()[-1] == "interrupted after 3 tokens"
    assert "Traceback" not in ended.err


@pytest.mark.usefixtures("interrupted")
def test_ctrl_c_still_gives_one_json_object(generate: Sooner) -> None:
    ended = generate("--draft", "none", "--json")
    assert ended.status == 130
    found = json.loads(ended.out)
    assert (found["finish_reason"], found["stats"], len(found["token_ids"])) == ("abort", None, 3)


def test_a_model_that_computes_nonsense_is_an_error_by_name(sooner: Sooner, tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "broken", seed=0)
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.nn.init.constant_(model.lm_head.weight, torch.nan)
    model.save_pretrained(folder)
    ended = sooner("generate", PROMPT, "--model", folder, "--dtype", "float32", "--json")
    assert ended.status == 2
    found = json.loads(ended.out)
    assert found["finish_reason"] == "error"
    assert "not finite" in found["error"]
    assert ended.err.splitlines()[-1] == f"error: {found['error']}"


@pytest.fixture
def on_a_terminal(generate: Sooner, monkeypatch: pytest.MonkeyPatch) -> Sooner:
    """generate, with captured streams that tell whoever asks that they are a terminal."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")

    def call(*arguments: object) -> Ended:
        # Not in the fixture itself: pytest changes the streams between setting up and calling.
        for stream in (sys.stdout, sys.stderr):
            monkeypatch.setattr(stream, "isatty", lambda: True)
        return generate(*arguments)

    return call


def letters(shown: str) -> list[tuple[str, bool]]:
    """Every character on the screen, and whether it is green."""
    found, green = [], False
    for part in re.split(r"(\x1b\[\d+m)", shown):
        if part.startswith("\x1b"):
            green = part == GREEN
        else:
            found += [(letter, green) for letter in part]
    return found


def test_on_a_terminal_accepted_guesses_are_green_and_the_rest_is_plain(on_a_terminal: Sooner, tiny: Path) -> None:
    llm = LLM(str(tiny), k=8, dtype="float32")
    chunks = llm.stream(llm.encode_chat(PROMPT), SamplingParams(max_tokens=40))
    expected = [(c, piece.drafted) for chunk in chunks for piece in chunk.pieces for c in printable(piece.text)]
    assert {drafted for _, drafted in expected} == {True, False}
    ended = on_a_terminal("--k", 8)
    assert letters(ended.out.removesuffix("\n")) == expected
    assert "green = guessed by auto and accepted" in ended.err


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_who_wants_no_colours_gets_none(
    on_a_terminal: Sooner, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    ended = on_a_terminal()
    assert "\x1b[3" not in ended.out
    assert "green" not in ended.err


def test_without_a_draft_there_is_no_green_to_explain(on_a_terminal: Sooner) -> None:
    ended = on_a_terminal("--draft", "none")
    assert GREEN not in ended.out
    assert "green" not in ended.err


SCHEMA = '{"enum": ["a", "b"]}'


@pytest.mark.parametrize("form", ["text", "file", "@file"])
@pytest.mark.parametrize(
    ("option", "source", "pattern"),
    [
        ("--json-schema", SCHEMA, r'"[ab]"'),
        ("--schema", SCHEMA, r'"[ab]"'),
        ("--grammar", 'root ::= "yes" | "no, " [a-c] "!"', r"yes|no, [a-c]!"),
    ],
)
def test_a_schema_or_a_grammar_is_text_or_a_file(
    generate: Sooner, tmp_path: Path, form: str, option: str, source: str, pattern: str
) -> None:
    (tmp_path / "shape").write_text(source)
    value = {"text": source, "file": tmp_path / "shape", "@file": f"@{tmp_path / 'shape'}"}[form]
    found = values(generate("--json", option, value))
    assert re.fullmatch(pattern, str(found["text"])), found["text"]
    assert found["finish_reason"] == "stop"


def test_a_bias_on_a_token_changes_the_text_as_it_says(generate: Sooner) -> None:
    plain = values(generate("--json"))
    first = plain["token_ids"][0]  # type: ignore[index]  # a list
    assert values(generate("--json", "--logit-bias", f"{first}=-100"))["token_ids"] != plain["token_ids"]
    always = values(generate("--json", "--logit-bias", "44=100", "--logit-bias", "45=-1.5"))
    assert always["token_ids"] == [44] * 40


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--logit-bias", "x=1"), "--logit-bias takes ID=X, a token id and a number, got 'x=1'."),
        (("--logit-bias", "7"), "--logit-bias takes ID=X, a token id and a number, got '7'."),
        (("--logit-bias", "7=1", "--logit-bias", "7=2"), "--logit-bias names id 7 twice."),
        (("--logit-bias", "7=nan"), "--logit-bias[7] must be a finite number"),
        (("--logit-bias", "4000=1"), "--logit-bias [4000] are not ids from 0 to 319."),
        (("--json-schema", "@nowhere"), "--json-schema: the file 'nowhere' cannot be read:"),
        (("--grammar", "root ::= other"), "structured_outputs grammar"),
        (("--regex", "a", "--choice", "b"), "--regex and --choice cannot be held to at once; give one of them."),
    ],
    ids=str,
)
def test_a_bias_or_shape_that_makes_no_sense_is_one_line(
    generate: Sooner, arguments: tuple[object, ...], expected: str
) -> None:
    assert generate(*arguments).complaint.startswith(expected)


def test_an_expected_text_is_a_draft(generate: Sooner, tmp_path: Path) -> None:
    plain = values(generate("--draft", "none", "--json"))
    (tmp_path / "expected.txt").write_text(plain["text"])
    found = values(
        generate("--draft", "prediction", "--prediction", tmp_path / "expected.txt", "--k", 8, "--json")
    )
    assert found["token_ids"] == plain["token_ids"]
    assert found["stats"]["drafted"] > 0
    refused = generate("--prediction", "any text")
    assert (refused.status, refused.out) == (2, "")
    assert "--prediction is used by --draft prediction only" in refused.err


def test_a_memory_limit_is_stated_and_kept(sooner: Sooner, tiny: Path) -> None:
    ended = sooner(
        "generate", "once", "--model", tiny, "--max-tokens", 8, "--kv-memory", "4MiB", "--dtype", "float32"
    )
    assert ended.status == 0
    assert "at most 4194304 bytes" in ended.err.splitlines()[0]


def test_a_memory_limit_that_holds_nothing_is_refused_by_its_option(sooner: Sooner, tiny: Path) -> None:
    error = sooner("generate", "once", "--model", tiny, "--kv-memory", "100").complaint
    assert error.startswith("--kv-memory of 100 bytes does not hold a single short text")


def test_a_memory_limit_needs_a_unit_that_exists(sooner: Sooner, tiny: Path) -> None:
    error = sooner("generate", "once", "--model", tiny, "--kv-memory", "4 apples").complaint
    assert error == "--kv-memory must be a size like 512MiB or 2GiB, got '4 apples'."
