"""Incremental text: the oracle is decoding the whole, and ``str.find``."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from engine_shim.model.tokenizer import read_card
from engine_shim.text import Detokenizer, StopMatcher, TextStream
from engine_shim.types import FinishReason


@cache
def byte_level() -> Tokenizer:
    """The needle model's tokenizer: byte-level, so characters are cut across tokens."""
    return read_card("needle").tokenizer


@cache
def byte_fallback() -> Tokenizer:
    """A tokenizer as Gemma's and Llama 2's: words with a leading mark, and one token per raw byte."""
    words = ["<unk>", "▁the", "▁cat", "s", "▁", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def chunks(ids: list[int], cuts: list[int]) -> list[list[int]]:
    bounds = [0, *sorted({cut % (len(ids) + 1) for cut in cuts}), len(ids)]
    return [ids[start:end] for start, end in pairwise(bounds)]


@settings(deadline=None)
@given(text=st.text(max_size=40), cuts=st.lists(st.integers(0, 200), max_size=8))
def test_pieces_add_up_to_the_text(text: str, cuts: list[int]) -> None:
    """However tokens arrive, the pieces joined are the decoding of all of them."""
    assume("<|" not in text)  # such as "<|endoftext|>", which is a token without text
    ids = byte_level().encode(text, add_special_tokens=False).ids
    detokenizer = Detokenizer(byte_level())
    pieces = [detokenizer.push(part) for part in chunks(ids, cuts)]
    assert "".join(pieces) + detokenizer.flush() == text


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, 4000), max_size=30), cuts=st.lists(st.integers(0, 200), max_size=8))
def test_arbitrary_tokens_add_up_too(ids: list[int], cuts: list[int]) -> None:
    """Tokens that are no valid UTF-8, and special tokens without text, change nothing in that."""
    detokenizer = Detokenizer(byte_level())
    pieces = [detokenizer.push(part) for part in chunks(ids, cuts)]
    assert "".join(pieces) + detokenizer.flush() == byte_level().decode(ids, skip_special_tokens=True)


# Real replacement marks look like unfinished characters to a decoder of bytes; they are another test's matter.
_CHARACTERS = st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd")


@settings(deadline=None)
@given(parts=st.lists(st.one_of(st.integers(1, 4), st.text(_CHARACTERS, min_size=1, max_size=3)), max_size=12))
def test_byte_fallback_adds_up(parts: list[int | str]) -> None:
    """With one token per byte and a stripped first space, too, where the bytes are text."""
    ids: list[int] = []
    for part in parts:
        ids += [part] if isinstance(part, int) else [5 + byte for byte in part.encode()]
    detokenizer = Detokenizer(byte_fallback())
    pieces = [detokenizer.push([token]) for token in ids]
    assert "".join(pieces) + detokenizer.flush() == byte_fallback().decode(ids)


def test_a_begun_character_is_held_back() -> None:
    """No piece ever shows a replacement mark for a character that the next token completes."""
    ids = byte_level().encode("ok 👍🏽 naïve 日本", add_special_tokens=False).ids
    assert len(ids) > 8, "the characters are cut across tokens"
    detokenizer = Detokenizer(byte_level())
    assert not any("\ufffd" in detokenizer.push([token]) for token in ids)
    assert detokenizer.flush() == ""


def test_tokens_without_text_do_not_pile_up() -> None:
    """A long run of special tokens is not decoded again and again."""
    end = byte_level().token_to_id("<|im_end|>")
    detokenizer = Detokenizer(byte_level())
    for _ in range(500):
        assert detokenizer.push([end]) == ""
    assert len(detokenizer._window) == 0


@settings(deadline=None)
@given(
    pieces=st.lists(st.text("ab\n", max_size=4), max_size=12),
    stops=st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=5),
)
def test_stop_strings_end_at_their_first_place(pieces: list[str], stops: list[str]) -> None:
    """What is told is the text before the earliest completed stop string, however it is cut; else all of it."""
    matcher = StopMatcher(stops)
    told = "".join(matcher.push(piece) for piece in pieces) + matcher.flush()
    whole = "".join(pieces)
    seen = ""
    for piece in pieces:  # stop strings are looked for as the text grows
        seen += piece
        places = [seen.find(stop) for stop in stops if stop in seen]
        if places:
            assert told == seen[: min(places)]
            assert matcher.matched is not None
            assert whole.startswith(told + matcher.matched)
            return
    assert (told, matcher.matched) == (whole, None)


@pytest.mark.parametrize("stop", ["👍", "\ufe0f b", "e 👍"])
def test_stop_inside_multibyte_text(stop: str) -> None:
    """A stop string whose bytes lie in several tokens is found, and tokens after it do not count."""
    text = "a e 👍\ufe0f b c d"
    ids = tuple(byte_level().encode(text, add_special_tokens=False).ids)
    merged = TextStream(byte_level(), stops=[stop]).push(ids, finish=FinishReason.LENGTH)
    assert (merged.text, merged.finish, merged.stop_reason) == (text[: text.find(stop)], FinishReason.STOP, stop)
    single = TextStream(byte_level(), stops=[stop])
    told, count, finish = "", 0, None
    while finish is None:
        piece = single.push(ids[count : count + 1], finish=None)
        told, count, finish = told + piece.text, count + 1, piece.finish
    assert (told, count) == (merged.text, len(merged.ids))
    assert stop in byte_level().decode(ids[:count])
    assert stop not in byte_level().decode(ids[: count - 1])


def test_the_ending_token_counts_but_is_no_text() -> None:
    """A stop token is told as stop_reason; an end-of-sequence token is not."""
    word, stop = byte_level().encode(" the search", add_special_tokens=False).ids
    stream = TextStream(byte_level(), stops=(), stop_token_ids=frozenset({stop}))
    piece = stream.push((word, stop), finish=FinishReason.STOP)
    assert (piece.text, piece.ids, piece.stop_reason) == (" the", (word, stop), stop)
    ended = TextStream(byte_level(), stops=()).push((word, stop), finish=FinishReason.STOP)
    assert (ended.text, ended.stop_reason) == (" the", None)
