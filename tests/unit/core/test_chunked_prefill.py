"""Prompts computed in pieces: what those behind one find of it, against passes that are filled one after the other."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.chunked_prefill import found_behind


def pieces(lacking: list[int], *, chunk_tokens: int, page_tokens: int) -> list[list[int]]:
    """The tokens of each prompt that ``PrefillAdder`` puts in one pass after another."""
    cut: list[list[int]] = []
    left = chunk_tokens
    for tokens in lacking:
        cut.append([])
        while tokens > left:
            if piece := left // page_tokens * page_tokens:
                cut[-1].append(piece)
                tokens -= piece
            left = chunk_tokens
        cut[-1].append(tokens)
        left -= -(-tokens // page_tokens) * page_tokens
        if left <= 0:
            left = chunk_tokens
    return cut


@pytest.mark.parametrize(
    ("waiting", "cached", "found"),
    [(0, 0, 128), (200, 128, 184), (272, 184, 0)],
    ids=["first of five", "second", "third"],
)
def test_five_times_the_same_prompt_at_once(waiting: int, cached: int, found: int) -> None:
    """Of 200 tokens with pieces of 128 and pages of 8, SGLang 0.5.23 reported 0, 128, 184, 184 and 184 cached: of the
    second 56 of the 72 that it lacked went into the pass of the first one's end.
    """
    assert found_behind(200, cached_tokens=cached, waiting_tokens=waiting, chunk_tokens=128, page_tokens=8) == found


@given(
    before=st.lists(st.integers(1, 40), max_size=5),
    lacking=st.integers(1, 900),
    cached_pages=st.integers(0, 9),
    page=st.sampled_from([1, 8, 16]),
    chunk_pages=st.integers(1, 20),
)
def test_all_pieces_but_the_last_are_found(
    before: list[int], lacking: int, cached_pages: int, page: int, chunk_pages: int
) -> None:
    """Whatever waits before it, by whole pages."""
    cached, chunk = cached_pages * page, chunk_pages * page
    waiting = [pages * page for pages in before]
    *_, own = pieces([*waiting, lacking], chunk_tokens=chunk, page_tokens=page)
    found = found_behind(
        cached + lacking, cached_tokens=cached, waiting_tokens=sum(waiting), chunk_tokens=chunk, page_tokens=page
    )
    assert found == (cached + sum(own[:-1]) if len(own) > 1 else 0)


def test_where_a_page_is_more_than_a_pass_nothing_is_found() -> None:
    """No piece of it enters the tree by itself."""
    assert found_behind(100, cached_tokens=0, waiting_tokens=0, chunk_tokens=8, page_tokens=16) == 0
