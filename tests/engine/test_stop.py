"""Where a text ends, held to a cut of the whole text made by brute force after every token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sooner.engine.stop import Piece, Writer

LETTERS = "ab"
STOP_ID = 99
many = settings(max_examples=600, deadline=None, derandomize=True)
texts = st.lists(st.text(LETTERS, max_size=4), max_size=12)
stops = st.lists(st.text(LETTERS, min_size=1, max_size=4), max_size=3)


@dataclass
class Spelled:
    """A detokenizer whose token i has the text texts[i]; `rest` comes at the end."""

    texts: Sequence[str]
    rest: str = ""
    pushed: list[int] = field(default_factory=list)

    def push(self, token: int) -> str:
        self.pushed.append(token)
        return self.texts[token] if token < len(self.texts) else "<stop>"

    def finish(self) -> str:
        return self.rest


def writer(
    texts: Sequence[str], stops: Sequence[str] = (), *, keep: bool = False, room: int | None = None, rest: str = ""
) -> Writer:
    return Writer(
        Spelled(texts, rest), stop_ids=frozenset({STOP_ID}), stops=tuple(stops), keep_stop=keep, room=room
    )


def write(one: Writer, tokens: Sequence[int]) -> tuple[int, list[str]]:
    """Push until the end; how many were taken, and what was given out after each."""
    given_out = []
    for count, token in enumerate(tokens):
        if one.finish is not None:
            return count, given_out
        one.push(token, drafted=False)
        given_out.append("".join(piece.text for piece in one.take()))
    return len(tokens), given_out


def cut(text: str, stops: Sequence[str], keep: bool) -> str | None:
    """The text up to its first stop string (of two at one place the shorter), or None without any."""
    found = sorted((text.find(stop), len(stop)) for stop in stops if stop in text)
    if not found:
        return None
    start, length = found[0]
    return text[: start + length] if keep else text[:start]


def brute_force(
    texts: Sequence[str], stops: Sequence[str], keep: bool, room: int | None, rest: str
) -> tuple[str, str | None, int]:
    """Text, finish reason and tokens taken, looking at the whole text after every token."""
    whole = ""
    for count, text in enumerate(texts, start=1):
        whole += text
        ended = cut(whole, stops, keep)
        if ended is not None:
            return ended, "stop", count
        if count == room:
            ended = cut(whole + rest, stops, keep)
            return (whole + rest, "length", count) if ended is None else (ended, "stop", count)
    return whole, None, len(texts)


@many
@given(texts=texts, stops=stops, keep=st.booleans(), room=st.integers(1, 14), rest=st.sampled_from(["", "a", "b"]))
def test_the_end_is_where_the_whole_text_says(
    texts: list[str], stops: list[str], keep: bool, room: int, rest: str
) -> None:
    one = writer(texts, stops, keep=keep, room=room, rest=rest)
    taken, given_out = write(one, range(len(texts)))
    text, finish, count = brute_force(texts, stops, keep, room, rest)
    assert (taken, one.finish) == (count, finish)
    if finish is not None:
        assert one.text == "".join(given_out) == text


@many
@given(texts=texts, stops=stops, keep=st.booleans())
def test_nothing_is_given_out_that_a_stop_could_still_take_back(
    texts: list[str], stops: list[str], keep: bool
) -> None:
    """After every token: all that no stop string begins in is out, and no letter more."""
    one = writer(texts, stops, keep=keep)
    whole, out = "", ""
    for token, text in enumerate(texts):
        one.push(token, drafted=False)
        whole += text
        out += "".join(piece.text for piece in one.take())
        if one.finish is not None:
            break
        held = max(
            (
                n
                for n in range(len(whole) + 1)
                for s in stops
                if len(s) > n and s.startswith(whole[len(whole) - n :])
            ),
            default=0,
        )
        assert out == whole[: len(whole) - held]


@many
@given(texts=texts, stops=stops, guesses=st.lists(st.booleans(), min_size=12, max_size=12))
def test_every_letter_is_marked_with_the_token_that_brought_it(
    texts: list[str], stops: list[str], guesses: list[bool]
) -> None:
    one = writer(texts, stops)
    marks: list[bool] = []
    for token, text in enumerate(texts):
        one.push(token, drafted=guesses[token])
        marks += [guesses[token]] * len(text)
        if one.finish is not None:
            break
    one.end("length")
    shown = [piece.drafted for piece in one.take() for _ in piece.text]
    assert shown == marks[: len(one.text)]


@pytest.mark.parametrize("keep", [False, True])
def test_a_stop_string_may_lie_over_many_tokens(keep: bool) -> None:
    one = writer(["x", "S", "T", "O", "P", "y"], ["STOP"], keep=keep)
    taken, given_out = write(one, range(6))
    assert (taken, one.finish) == (5, "stop")
    assert given_out == ["x", "", "", "", "STOP" if keep else ""]


def test_what_only_began_like_a_stop_is_given_out_after_all() -> None:
    one = writer(["xS", "T", "x"], ["STOP"])
    assert write(one, range(3))[1] == ["x", "", "STx"]


def test_the_first_of_several_stops_wins_whatever_their_order() -> None:
    for order in (["long stop", "b"], ["b", "long stop"]):
        one = writer(["abc"], order)
        write(one, [0])
        assert (one.text, one.finish) == ("a", "stop")


def test_stop_strings_are_looked_for_in_the_new_text_alone() -> None:
    """The prompt may well end in "ST" or hold a whole stop string."""
    one = writer(["OP", "x"], ["STOP"])
    assert write(one, range(2))[1] == ["OP", "x"]


@pytest.mark.parametrize(("keep", "text"), [(False, "a"), (True, "a<stop>")])
def test_a_stop_id_ends_the_text_and_shows_only_when_asked_for(keep: bool, text: str) -> None:
    one = writer(["a", "b"], keep=keep)
    taken, _ = write(one, [0, STOP_ID, 1])
    assert (taken, one.text, one.finish) == (2, text, "stop")


def test_a_stop_id_in_the_last_place_there_is_room_for_is_a_stop() -> None:
    one = writer(["a"], room=2)
    write(one, [0, STOP_ID])
    assert one.finish == "stop"


def test_a_stop_string_in_the_last_place_there_is_room_for_is_a_stop() -> None:
    one = writer(["a", "b"], ["b"], room=2)
    write(one, [0, 1])
    assert (one.text, one.finish) == ("a", "stop")


def test_text_held_back_at_the_end_is_given_out() -> None:
    one = writer(["xST"], ["STOP"], room=1)
    assert write(one, [0])[1] == ["xST"]
    assert one.finish == "length"


def test_an_abort_gives_out_what_was_held_back_and_changes_no_earlier_end() -> None:
    one = writer(["ST", "b"], ["STOP"])
    write(one, [0])
    one.end("abort")
    one.end("error")
    assert (one.text, one.finish) == ("ST", "abort")
    assert one.take() == (Piece("ST", False),)
    assert one.take() == ()


def test_tokens_without_text_count_towards_the_room() -> None:
    one = writer(["", "", ""], room=2)
    assert write(one, range(3))[0] == 2
    assert one.finish == "length"


def test_a_text_that_a_grammar_completes_with_the_last_token_there_is_room_for_has_stopped() -> None:
    one = writer(["a", "b"], room=2)
    one.push(0, False)
    one.push(1, False, complete=True)
    assert (one.finish, one.text) == ("stop", "ab")
