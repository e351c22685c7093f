"""`sooner generate`: text on the screen, as it is written. Knows nothing of drafts but their colour."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from sooner.cli import options
from sooner.cli.pull import pull_first
from sooner.cli.terminal import coloured, complain, dim, printable, waiting
from sooner.errors import ConfigError
from sooner.model.pull import DEFAULT_MODEL
from sooner.params import RULES, Rule, SamplingParams
from sooner.structured import StructuredOutputs

if TYPE_CHECKING:
    from sooner.llm import LLM, Chunk, Result

_FLOOR = -9999.0  # stands for the logarithm of 0, which JSON cannot write


def generate(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The prompt; - reads it from standard input.")],
    model: options.Model = DEFAULT_MODEL,
    draft: Annotated[
        str,
        typer.Option(
            help="auto, none, lookup, suffix, prediction, recycle[:TABLE], model:PATH, self:int8, self:int4, "
            "early-exit[:N], medusa:PATH; A+B joins several."
        ),
    ] = "auto",
    k: options.K = None,
    width: options.Width = None,
    max_tokens: options.MaxTokens = 256,
    temperature: options.Temperature = 0.0,
    top_p: Annotated[float, typer.Option(metavar="P", help="Sample from the likeliest tokens of mass P.")] = 1.0,
    top_k: Annotated[int, typer.Option(metavar="N", help="Sample from the N likeliest tokens; 0 = all.")] = 0,
    min_p: Annotated[
        float, typer.Option(metavar="P", help="Sample from tokens at least P times as likely as the likeliest.")
    ] = 0.0,
    typical_p: Annotated[
        float, typer.Option(metavar="P", help="Sample from tokens of typical surprise, of mass P.")
    ] = 1.0,
    repetition_penalty: Annotated[
        float, typer.Option(metavar="X", help="Above 1: tokens of prompt and text become less likely.")
    ] = 1.0,
    presence_penalty: Annotated[
        float, typer.Option(metavar="X", help="Taken off the logit of every token in the text.")
    ] = 0.0,
    frequency_penalty: Annotated[
        float, typer.Option(metavar="X", help="Taken off once for every occurrence in the text.")
    ] = 0.0,
    min_tokens: Annotated[int, typer.Option(metavar="N", help="The text ends no sooner by itself.")] = 0,
    bad_word: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Never write this; may be given several times.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(metavar="S", help="Makes sampling repeatable.", show_default="fresh each time")
    ] = None,
    rule: Annotated[str, typer.Option(help=f"How drafts are checked: {', '.join(RULES)}.")] = "auto",
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="End before this text; may be given several times.")
    ] = None,
    logprobs: Annotated[
        int | None,
        typer.Option(metavar="N", help="With --json: log-probabilities, and the N likeliest tokens."),
    ] = None,
    logit_bias: Annotated[
        list[str] | None,
        typer.Option(metavar="ID=X", help="Added to the logit of a token id; may be given several times."),
    ] = None,
    schema: Annotated[
        str | None,
        typer.Option(
            "--json-schema", "--schema", metavar="JSON", help="Write JSON of this schema (text, or a file)."
        ),
    ] = None,
    grammar: Annotated[
        str | None, typer.Option(metavar="EBNF", help="Write text of this grammar (text, or a file).")
    ] = None,
    regex: Annotated[
        str | None, typer.Option(metavar="EXPR", help="Write text that this expression matches.")
    ] = None,
    choice: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Write one of these; give it several times.")
    ] = None,
    prediction: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="With --draft prediction: the text you expect (text, or a file)."),
    ] = None,
    allow_pickles: Annotated[
        bool, typer.Option("--allow-pickles", help="Read draft heads from .pt and .bin files too.")
    ] = False,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    runtime: options.Runtime = "auto",
    quantize: options.Quantize = None,
    threads: options.Threads = None,
    kv_memory: options.KvMemory = None,
    raw: options.Raw = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the text.")] = False,
) -> None:
    """Write text after a prompt, drafted ahead and checked: what comes out is the model's own text.

    On a terminal, tokens that were guessed and accepted are green. The line at the end goes to standard
    error, so standard output is the text alone.
    """
    if logprobs is not None and not as_json:
        raise ConfigError("logprobs are shown with --json only; add --json.")
    if prediction is not None and "prediction" not in draft.split("+"):
        raise ConfigError(
            "--prediction is used by --draft prediction only; add it, or join it: prediction+lookup."
        )
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        typical_p=typical_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        min_tokens=min_tokens,
        bad_words=tuple(bad_word or ()),
        logit_bias=biases(logit_bias or ()),
        structured_outputs=structured(schema, grammar, regex, choice),
        seed=seed,
        stop=tuple(stop or ()),
        logprobs=logprobs,
        rule=cast(Rule, rule),  # SamplingParams checks it
        prediction=None if prediction is None else text_or_file("--prediction", prediction),
    )
    text = read_prompt(prompt)
    pull_first(model, draft.removeprefix("model:"))
    with waiting(f"loading {model}"):
        from sooner.llm import LLM

        llm = LLM(
            model,
            draft,
            k=k,
            width=width,
            dtype=dtype,
            device=device,
            runtime=runtime,
            quantize=quantize,
            threads=threads,
            allow_pickles=allow_pickles,
            kv_memory=kv_memory,
        )
        ids = llm.encode(text) if raw else llm.encode_chat(text)
    if kv_memory is not None:
        dim(str(llm.engine.memory))
    written = _follow(llm, ids, params, _nothing if as_json else _show)
    if as_json:
        typer.echo(json.dumps({"model": model, "draft": draft, **_values(llm, ids, written)}))
    elif not written.text.endswith("\n"):
        typer.echo()
    _close(written, None if as_json or not coloured(sys.stdout) else draft)


@dataclass(slots=True)
class Written:
    """What has been written so far; `result` is there once the text has ended by itself."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    result: Result | None = None


def biases(given: Sequence[str]) -> dict[int, float]:
    """From "ID=X" to {ID: X}. Raises ConfigError."""
    found: dict[int, float] = {}
    for one in given:
        token, _, added = one.partition("=")
        try:
            pair = int(token), float(added)
        except ValueError:
            raise ConfigError(f"--logit-bias takes ID=X, a token id and a number, got {one!r}.") from None
        if pair[0] in found:
            raise ConfigError(f"--logit-bias names id {pair[0]} twice.")
        found |= [pair]
    return found


def structured(
    schema: str | None, grammar: str | None, regex: str | None, choice: list[str] | None
) -> StructuredOutputs | None:
    """The shape the text must have, None for any. Raises ConfigError."""
    given = {"--json-schema": schema, "--grammar": grammar, "--regex": regex, "--choice": choice or None}
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise ConfigError(f"{' and '.join(named)} cannot be held to at once; give one of them.")
    if not named:
        return None
    return StructuredOutputs(
        json=None if schema is None else text_or_file("--json-schema", schema),
        grammar=None if grammar is None else text_or_file("--grammar", grammar),
        regex=regex,
        choice=tuple(choice) if choice else None,
    )


def text_or_file(option: str, value: str) -> str:
    """The value itself, or what the file holds that it names (@FILE must be one). Raises ConfigError."""
    name = value.removeprefix("@")
    if name == value and not _is_file(value):
        return value
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a name no file can have
        raise ConfigError(f"{option}: the file {name!r} cannot be read: {error}.") from None


def _is_file(name: str) -> bool:
    try:
        return Path(name).is_file()
    except (OSError, ValueError):  # text that is no name: too long, or with a NUL in it
        return False


def read_prompt(prompt: str) -> str:
    """The prompt itself, or standard input without its last line break. Raises ConfigError."""
    if prompt == "-":
        try:
            prompt = sys.stdin.buffer.read().decode("utf-8").removesuffix("\n")
        except UnicodeDecodeError as error:
            raise ConfigError(f"the prompt is not UTF-8 text: {error.reason} at byte {error.start}.") from None
    if prompt != prompt.encode("utf-8", "replace").decode("utf-8"):
        raise ConfigError("the prompt is not UTF-8 text.")
    if not prompt:
        raise ConfigError("the prompt is empty: give some text, or - to read it from standard input.")
    return prompt


def _follow(llm: LLM, ids: list[int], params: SamplingParams, show: Callable[[Chunk], None]) -> Written:
    """Write to the end, or until Ctrl-C."""
    written = Written()
    try:
        for chunk in llm.stream(ids, params):
            written.text += chunk.text
            written.token_ids += chunk.token_ids
            written.result = chunk.result
            show(chunk)
    except KeyboardInterrupt:
        written.result = None
    return written


def _nothing(chunk: Chunk) -> None:
    """For --json: all of it comes at the end."""


def _show(chunk: Chunk) -> None:
    colours, terminal = coloured(sys.stdout), sys.stdout.isatty()
    for drafted, pieces in groupby(chunk.pieces, key=lambda piece: piece.drafted):
        text = "".join(piece.text for piece in pieces)
        text = printable(text) if terminal else text
        sys.stdout.write(typer.style(text, fg=typer.colors.GREEN) if colours and drafted else text)
    sys.stdout.flush()


def _values(llm: LLM, ids: list[int], written: Written) -> dict[str, object]:
    """The JSON object's part about the text. After Ctrl-C: what there is, with finish_reason "abort"."""
    result = written.result
    values: dict[str, object] = {
        "text": written.text,
        "token_ids": written.token_ids,
        "prompt_tokens": len(ids),
        "finish_reason": "abort" if result is None else result.finish_reason,
        "stats": None if result is None else result.stats.as_dict(),
    }
    if result is not None and result.logprobs is not None:
        values["logprobs"] = [
            {
                **_token(llm, entry.token, entry.logprob),
                "top": [_token(llm, token, logprob) for token, logprob in entry.top],
            }
            for entry in result.logprobs
        ]
    if result is not None and result.error is not None:
        values["error"] = result.error
    return values


def _token(llm: LLM, token: int, logprob: float) -> dict[str, object]:
    text: str = llm.target.tokenizer.decode([token])
    return {"id": token, "text": text, "logprob": max(logprob, _FLOOR)}


def _close(written: Written, coloured_draft: str | None) -> None:
    """The last line, and the exit status of a text that did not end well."""
    if written.result is None:
        dim(f"interrupted after {len(written.token_ids)} tokens")
        raise typer.Exit(130)
    dim(_summary(written.result, coloured_draft))
    if written.result.error is not None:
        complain(written.result.error)
        raise typer.Exit(2)


def _summary(result: Result, coloured_draft: str | None) -> str:
    stats = result.stats
    parts = [f"{stats.emitted} token{'s' * (stats.emitted != 1)}"]
    if stats.decode_s > 0:
        parts.append(f"{stats.tokens_per_second:.1f} tok/s")
    parts.append(f"{stats.tokens_per_step:.2f} tokens per step")
    if stats.drafted:
        parts.append(f"{stats.accepted} of {stats.drafted} drafted tokens accepted ({stats.acceptance:.0%})")
    if stats.draft_failures:
        parts.append(f"{stats.draft_failures} drafts failed")
    if coloured_draft is not None and stats.accepted:
        parts.append(f"green = guessed by {coloured_draft} and accepted")
    return ", ".join(parts)
