"""What each kind of attention asks for and holds on to, token by token."""

from __future__ import annotations

from itertools import product

import pytest

from router.core.usable import Geometry, Kind, Rule, boundary, retention_of, rule_of

SIZES = [*product((1, 2, 3, 4), (1, 2, 3, 5, 6, 8))]


@pytest.mark.parametrize(("block_tokens", "chunk_tokens"), SIZES)
def test_a_chunk_is_needed_from_the_block_on_in_which_it_begins(block_tokens: int, chunk_tokens: int) -> None:
    """The query behind a boundary sees the tokens of its own chunk: every block that has one of them is needed. vLLM's
    ``ChunkedLocalAttentionManager.find_longest_cache_hit`` asks for the same."""
    rule = rule_of(
        "chunked_local_attention",
        window_tokens=None,
        block_tokens=block_tokens,
        unit_tokens=1,
        geometry=Geometry(chunk_tokens=chunk_tokens),
    )
    for end in range(13):
        query = end * block_tokens
        seen = [token for token in range(query) if token // chunk_tokens == query // chunk_tokens]
        blocks = sorted({token // block_tokens for token in seen})
        assert [*range(rule.first_needed(end), end)] == blocks


@pytest.mark.parametrize(("block_tokens", "chunk_tokens"), SIZES)
def test_a_request_holds_on_to_the_chunk_of_its_next_token(block_tokens: int, chunk_tokens: int) -> None:
    """Of so many computed tokens: the block with the first token of the chunk that goes on, or begins, behind them."""
    rule = Rule(Kind.CHUNK, needed=chunk_tokens)
    for tokens in range(40):
        first = min(token for token in range(tokens + 1) if token // chunk_tokens == tokens // chunk_tokens)
        assert rule.first_held(tokens, block_tokens=block_tokens) == first // block_tokens


@pytest.mark.parametrize(("block_tokens", "window_tokens"), SIZES)
def test_a_request_holds_on_to_what_the_next_query_sees_of_a_window(block_tokens: int, window_tokens: int) -> None:
    """A window of W has the query itself and the W - 1 tokens before it (``SlidingWindowManager``)."""
    rule = Rule(Kind.WINDOW, needed=1, window_tokens=window_tokens)
    for tokens in range(40):
        seen = max(0, tokens - (window_tokens - 1))
        assert rule.first_held(tokens, block_tokens=block_tokens) == seen // block_tokens


@pytest.mark.parametrize("block_tokens", [1, 2, 3])
def test_a_request_holds_on_to_the_last_state(block_tokens: int) -> None:
    """That behind the last computed token: of whole blocks the last one."""
    rule = Rule(Kind.WINDOW, needed=1)
    assert rule.is_state
    for blocks in range(1, 9):
        assert rule.first_held(blocks * block_tokens, block_tokens=block_tokens) == blocks - 1


@pytest.mark.parametrize(("eagle", "needed"), [(False, 1), (True, 2)])
def test_a_window_of_the_query_alone_asks_for_a_block(eagle: bool, needed: int) -> None:
    """It sees no token before, but vLLM looks for one block all the same, and for one more with EAGLE."""
    rule = rule_of("sliding_window", window_tokens=1, block_tokens=16, unit_tokens=16, geometry=Geometry(eagle=eagle))
    assert (rule.kind, rule.needed) == (Kind.WINDOW, needed)


@pytest.mark.parametrize(
    ("told", "tokens"), [(True, None), (False, None), ("²", None), ("٣", 3), ("-1", None), ("1.5", None), (1.5, None)]
)
def test_what_is_no_number_of_tokens_retains_nothing(told: object, tokens: int | None) -> None:
    """A flag is no number; a digit is one in any script, a superscript in none."""
    assert retention_of(told) == tokens


@pytest.mark.parametrize("align", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("depth", range(13))
def test_hits_end_where_all_groups_have_a_blocks_end(depth: int, align: int) -> None:
    """Whatever the groups ask for, encoders' alone, or a window that has every block."""
    aligned = depth - depth % align
    assert boundary(range(12), depth, bit=1, groups={}, rules={}, align=align) == aligned
    rules = {0: Rule(Kind.UNUSED), 1: Rule(Kind.WINDOW, needed=2)}
    groups = {group: lambda _key: 1 for group in rules}
    assert boundary(range(12), depth, bit=1, groups=groups, rules=rules, align=align) == aligned


@pytest.mark.parametrize("needed", [1, 2, 3, 4])
@pytest.mark.parametrize("segment", [1, 2, 3, 4, 6])
def test_a_window_keeps_what_lies_before_a_segments_end(segment: int, needed: int) -> None:
    """Block by block: those of which a boundary at the end of any segment asks (``reachable_block_mask``)."""
    rule = Rule(Kind.WINDOW, needed=needed, window_tokens=99)
    ends = range(segment, 40, segment)
    expected = [block for block in range(12) if any(end - needed <= block < end for end in ends)]
    assert list(rule.kept(0, 12, ends=(), segment_tokens=segment)) == expected
