"""Streamed text is the decode of the tokens, and stop strings do not see token borders."""

import dataclasses
import functools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.text.stream import TextStream
from jaxserve.text.tokenizer import Tokenizer

TINY = Path(__file__).parent / "data" / "tiny"
FAMILY = "👨‍👩‍👧‍👦"


@dataclasses.dataclass
class Pieces:
    """A tokenizer whose tokens are the pieces of one text."""

    pieces: list[bytes]

    @property
    def vocab_size(self) -> int:
        return len(self.pieces)

    def token_bytes(self, token_id: int) -> bytes:
        return self.pieces[token_id]


def run(pieces: list[str | bytes], stop=()) -> tuple[list[str], TextStream]:
    """The deltas of a stream, the last flush among them."""
    tokenizer = Pieces([piece.encode() if isinstance(piece, str) else piece for piece in pieces])
    stream = TextStream(tokenizer, stop)
    return [*(stream.push(index) for index in range(len(pieces))), stream.finish()], stream


def expected_text(text: str, stops: tuple[str, ...]) -> tuple[str, bool]:
    """Reading character by character, the first stop to be complete wins, the longest of several."""
    for end in range(1, len(text) + 1):
        complete = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(complete)], True
    return text, False


def test_stop_string_across_three_tokens_is_never_shown():
    deltas, stream = run(["al", "pha be", "ta ga", "mma x"], ("beta gamma",))
    assert deltas == ["al", "pha ", "", "", ""]
    assert (stream.text, stream.stopped) == ("alpha ", True)


def test_stream_stops_at_the_token_that_completes_the_stop_string():
    tokenizer = Pieces([b"one ", b"STO", b"P more"])
    stream = TextStream(tokenizer, ("STOP",))
    stopped = [(stream.push(index), stream.stopped) for index in range(3)]
    assert stopped == [("one ", False), ("", False), ("", True)]


@pytest.mark.parametrize(
    "pieces, stop, text",
    [
        (["abcd"], ("bc", "c"), "a"),  # both end at c: the longest
        (["abcd"], ("cd", "b"), "a"),  # b is complete first
        (["abc"], ("abcd",), "abc"),  # never complete: released
        (["aab"], ("ab",), "a"),  # a failed beginning that contains another
        (["abab", "abc"], ("ababc",), "ab"),
        (["stop"], ("stop",), ""),
        (["x"], ("x", "x"), ""),
        (["a", "\n", "\n", "b"], ("\n\n",), "a"),
        (["日本", "語です"], ("本語",), "日"),
        (["a", b"\xff", "b"], ("\ufffdb",), "a"),
    ],
)
def test_text_ends_before_the_stop_string(pieces, stop, text):
    deltas, stream = run(pieces, stop)
    assert stream.text == "".join(deltas) == text
    assert (
        stream.stopped == expected_text(b"".join(map(bytes_of, pieces)).decode("utf-8", "replace"), stop)[1]
    )


def bytes_of(piece: str | bytes) -> bytes:
    return piece.encode() if isinstance(piece, str) else piece


def test_a_plain_string_is_one_stop():
    assert run(["hello"], "ell")[1].text == "h"


def test_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="at least one character"):
        run(["a"], ("",))


def test_tokens_after_a_stop_add_nothing():
    deltas, stream = run(["a.", "b"], (".",))
    assert deltas == ["a", "", ""] and stream.text == "a"


def test_only_a_suffix_that_may_begin_a_stop_is_held_back():
    deltas, _ = run(["abc<", "x<|", "end", "y"], ("<|end|>",))
    assert deltas == ["abc", "<x", "", "<|endy", ""]


@pytest.mark.parametrize("text", ["é", "語", FAMILY, "    .", "aé b語 c" + FAMILY])
def test_characters_that_come_one_byte_per_token_are_shown_whole(text):
    deltas, stream = run([bytes([byte]) for byte in text.encode()])
    assert stream.text == "".join(deltas) == text
    assert all("\ufffd" not in delta for delta in deltas)
    assert [delta for delta in deltas if delta] == list(text)


def test_leading_spaces_of_pieces_stay():
    assert run([" the", " cat", "    ", "."])[0] == [" the", " cat", "    ", ".", ""]


def test_incomplete_end_is_one_replacement_character_in_the_last_flush():
    deltas, stream = run(["a", FAMILY.encode()[:3]])
    assert deltas == ["a", "", "\ufffd"] and stream.text == "a\ufffd"


def test_truly_invalid_bytes_are_replaced_as_python_does():
    damaged = b"a\xffb\xc3(\xe4\xbdc\xed\xa0\x80"
    deltas, _ = run([bytes([byte]) for byte in damaged])
    assert "".join(deltas) == damaged.decode("utf-8", "replace")


def test_text_before_the_flush_is_what_was_given_out():
    stream = TextStream(Pieces([b"ab<"]), ("<end>",))
    assert stream.push(0) == stream.text == "ab"
    assert stream.finish() == "<"
    assert stream.text == "ab<"


def test_id_past_the_vocabulary_adds_nothing():
    stream = TextStream(Pieces([b"a"]))
    assert [stream.push(0), stream.push(1), stream.push(0)] == ["a", "", "a"]


@st.composite
def cut_texts(draw) -> tuple[str, list[bytes]]:
    """A text, and its bytes cut at random places."""
    text = draw(st.text("abé語\n", max_size=40))
    data = text.encode()
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=12)))
    return text, [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


STOPS = st.lists(st.text("abé語", min_size=1, max_size=4), max_size=4).map(tuple)


@settings(deadline=None)
@given(cut_texts(), STOPS)
def test_result_does_not_depend_on_token_borders(cut, stops):
    text, pieces = cut
    deltas, stream = run(pieces, stops)
    assert ("".join(deltas), stream.stopped) == expected_text(text, stops)
    assert stream.text == "".join(deltas)


@settings(deadline=None)
@given(cut_texts(), STOPS)
def test_everything_that_cannot_begin_a_stop_is_given_out_at_once(cut, stops):
    _, pieces = cut
    stream, shown, seen = TextStream(Pieces(pieces), stops), "", b""
    for index, piece in enumerate(pieces):
        shown, seen = shown + stream.push(index), seen + piece
        text = seen.decode(errors="ignore")
        if stream.stopped:
            break
        beginnings = [n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])]
        assert shown == text[: len(text) - max(beginnings, default=0)]


@pytest.mark.parametrize("name", ["gemma3-bf16", "qwen35-bf16"])
@settings(deadline=None)
@given(ids=st.lists(st.integers(0, 383), max_size=40))
def test_streamed_text_is_the_decode_of_the_ids(name, ids):
    tokenizer = tokenizers(name)
    stream = TextStream(tokenizer)
    deltas = [stream.push(index) for index in ids]
    assert "".join([*deltas, stream.finish()]) == tokenizer.decode(ids)


@functools.cache
def tokenizers(name: str) -> Tokenizer:
    return Tokenizer.from_gguf(TINY / f"{name}.gguf")
