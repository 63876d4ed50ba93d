"""The ideal hit rate: the longest beginning shared with anything before, by brute force and by arithmetic."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from loadtest.ideal import PIECE_BYTES, IdealCache, RequestDigest, layout
from loadtest.text import Message

PROMPTS = st.lists(
    st.lists(st.text(alphabet="ab ", min_size=0, max_size=60), min_size=1, max_size=4), min_size=1, max_size=12
)


def chat(*contents: str) -> tuple[Message, ...]:
    return tuple(Message("assistant" if n % 2 else "user", content) for n, content in enumerate(contents))


def common_bytes(left: bytes, right: bytes) -> int:
    return next((n for n, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


@given(PROMPTS)
def test_share_is_the_longest_common_beginning_in_pieces(prompts: list[list[str]]) -> None:
    """Against a comparison with every earlier prompt, byte by byte, rounded down to whole pieces."""
    cache = IdealCache()
    before: list[bytes] = []
    for contents in prompts:
        messages = chat(*contents)
        text = layout(messages)
        longest = max((common_bytes(text, old) for old in before), default=0)
        assert cache.share(messages) == longest // PIECE_BYTES * PIECE_BYTES / len(text)
        before.append(text)


def test_a_repeated_prompt_is_shared_but_for_its_last_piece() -> None:
    """Of 100 bytes of text and 7 of its frame, three pieces of 32 are whole."""
    cache = IdealCache()
    messages = chat("x" * 100)
    assert len(layout(messages)) == 107
    assert cache.share(messages) == 0.0
    assert cache.share(messages) == 96 / 107


def test_a_role_is_part_of_what_is_shared() -> None:
    """The same words said by another share nothing."""
    cache = IdealCache()
    cache.share((Message("user", "w " * 100),))
    assert cache.share((Message("system", "w " * 100),)) == 0.0


def test_the_digest_is_of_the_multiset() -> None:
    """Order does not matter, number does."""
    digests = []
    for bodies in (b"ab", b"ba", b"aab", b"ac"):
        digest = RequestDigest()
        for body in bodies:
            digest.add(bytes([body]))
        digests.append(digest.hex)
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3
