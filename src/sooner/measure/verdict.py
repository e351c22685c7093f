"""A verdict as tables and lines for people, and as plain values for JSON. Judges nothing."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from sooner.measure.exact import Divergence, Outcome, Setup, Verdict

COLOURS = {"PASS": "bold green", "NUMERIC": "bold yellow", "BUG": "bold red"}
_SHOWN = 20  # divergences in the table; JSON has all
_LONGEST = 16  # characters of a token in the table


def as_dict(setup: Setup, verdict: Verdict) -> dict[str, object]:
    """Plain values for JSON."""
    found = verdict.noise
    return {
        "verdict": verdict.word,
        "model": setup.model,
        "dtype": found.dtype,
        "device": verdict.device,
        "outcomes": [_outcome(outcome) for outcome in verdict.outcomes],
        "rows": {
            "chain": found.chain,
            "tree": found.tree,
            "scale": round(found.scale, 4),
            "bound": found.bound,
        },
        "settings": {
            "max_tokens": setup.max_tokens,
            "temperature": setup.temperature,
            "seed": setup.seed,
            "batch": setup.batch,
            "k": setup.k,
            "width": setup.width,
            "raw": setup.raw,
            "inject_fault": setup.inject_fault,
        },
    }


def _outcome(outcome: Outcome) -> dict[str, object]:
    return {
        "draft": outcome.draft,
        "mode": outcome.mode,
        "verdict": outcome.word,
        "texts": outcome.texts,
        "identical": outcome.identical,
        "steps": outcome.steps,
        "tokens": outcome.tokens,
        "divergences": [_divergence(one) for one in outcome.divergences],
    }


def _divergence(one: Divergence) -> dict[str, object]:
    return {
        "question_id": one.question_id,
        "verdict": one.word,
        "position": one.position,
        "expected": one.expected,
        "got": one.got,
        "margin": one.margin,
        "bound": one.bound,
    }


def tables(verdict: Verdict) -> Iterator[Table]:
    """One line for each drafter and mode, then the places where texts part."""
    whole = Table()
    whole.add_column("draft", overflow="fold")
    whole.add_column("texts")
    for column in ("identical", "near-ties", "bugs", "tokens per step"):
        whole.add_column(column, justify="right")
    whole.add_column("verdict")
    for one in verdict.outcomes:
        bugs = sum(divergence.word == "BUG" for divergence in one.divergences)
        ties = len(one.divergences) - bugs
        speed = f"{one.tokens / one.steps:.2f}" if one.steps else "-"
        identical = f"{one.identical} of {one.texts}"
        whole.add_row(one.draft, one.mode, identical, str(ties), str(bugs), speed, _word(one.word))
    yield whole
    parted = [divergence for outcome in verdict.outcomes for divergence in outcome.divergences]
    if parted:
        yield _parted(parted)


def _parted(divergences: list[Divergence]) -> Table:
    left = len(divergences) - _SHOWN
    caption = f"and {left} more; --json shows all" if left > 0 else None
    table = Table(title="where texts part from plain decoding", title_justify="left", caption=caption)
    table.add_column("prompt")
    table.add_column("draft", overflow="fold")
    table.add_column("texts")
    table.add_column("at token", justify="right")
    table.add_column("plain wrote")
    table.add_column("got")
    table.add_column("margin", justify="right")
    table.add_column("bound", justify="right")
    table.add_column("verdict")
    for one in sorted(divergences, key=lambda one: one.word)[:_SHOWN]:
        margin = "-" if one.margin is None else f"{one.margin:.2g}"
        tokens = (_token(one.expected, one.spelled[0]), _token(one.got, one.spelled[1]))
        place = (str(one.question_id), one.draft, one.mode, str(one.position))
        table.add_row(*place, *tokens, margin, f"{one.bound:.2g}", _word(one.word))
    return table


def _token(token: int | None, spelled: str) -> Text:
    if token is None:
        return Text("(the end)")
    short = spelled if len(spelled) <= _LONGEST else spelled[: _LONGEST - 1] + "…"
    return Text(f"{short!r}")


def _word(word: str) -> Text:
    return Text(word, style=COLOURS[word])


def lines(setup: Setup, verdict: Verdict) -> Iterator[Text]:
    """The noise of rows, and the verdict in a sentence."""
    found = verdict.noise
    kinds = {"chains": found.chain, "trees": found.tree}
    said = [f"{_rows(moved)} in {kind}" for kind, moved in kinds.items() if moved is not None]
    yield Text(f"rows:  {', '.join(said)}")
    yield Text(f"bound: in {found.dtype} a margin of up to {found.bound:.2g} may be rounding")
    line = _word(verdict.word)
    line.append(f"  {_sentence(verdict, setup.inject_fault)}", style="not bold default")
    yield line


def _rows(moved: float) -> str:
    return f"margins move by up to {moved:.2g}" if moved else "bit-identical to the row alone"


def _sentence(verdict: Verdict, injected: bool) -> str:
    texts = sum(outcome.texts for outcome in verdict.outcomes)
    parted = [divergence for outcome in verdict.outcomes for divergence in outcome.divergences]
    if verdict.word == "PASS":
        return f"all {texts} texts are, token by token, those of plain decoding."
    if verdict.word == "NUMERIC":
        return (
            f"{len(parted)} of {texts} texts part from plain decoding, each at a near-tie that rounding in "
            f"{verdict.noise.dtype} may decide either way."
        )
    bugs = sum(divergence.word == "BUG" for divergence in parted)
    why = f"{bugs} of {texts} texts part from plain decoding where it was sure of its token." if bugs else ""
    rows = (
        "The rows of drafts differ from the same rows alone by more than rounding." if verdict.noise.broken else ""
    )
    ending = "So the injected fault is found." if injected else "Please report this."
    return " ".join(filter(None, (why, rows, ending)))
