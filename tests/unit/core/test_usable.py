"""Usable prefixes, against the rules applied to every boundary one by one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.usable import Geometry, Kind, Mask, Rule, boundary, retention_of, rule_of, slots_of


@settings(deadline=None)
@given(slots=st.sets(st.integers(0, 200)))
def test_slots_are_listed_from_the_lowest(slots: set[int]) -> None:
    """A mask's bits, in order, beyond 64 too."""
    assert list(slots_of(sum(1 << slot for slot in slots))) == sorted(slots)


def masks_of(held: dict[int, set[int]], *, bit: int, rules: dict[int, Rule]) -> dict[int, Mask]:
    """Block j of a group is named by the key of its last unit; here keys are the units' numbers."""

    def mask_of(group: int) -> Mask:
        ends = {(block + 1) * rules[group].stride - 1 for block in held[group]}
        return lambda key: bit if key in ends else 0

    return {group: mask_of(group) for group in held}


def accepts(rule: Rule, held: set[int], end: int) -> bool:
    """The rule of one group in its own words: which blocks must be there for a hit of ``end`` units."""
    if rule.kind is Kind.UNUSED:
        return True
    if end % rule.stride:
        return False
    blocks = end // rule.stride
    first = {
        Kind.WINDOW: max(0, blocks - rule.needed),
        Kind.CHUNK: end // max(1, rule.needed) * rule.needed // rule.stride,
        Kind.DENSE: 0,
    }[rule.kind]
    return all(block in held for block in range(first, blocks))


RULES = st.builds(Rule, st.sampled_from(Kind), st.integers(1, 3), st.integers(1, 6))


@settings(deadline=None)
@given(
    depth=st.integers(0, 12),
    groups=st.dictionaries(st.integers(0, 5), st.tuples(RULES, st.sets(st.integers(0, 11))), max_size=3),
    slot=st.sampled_from([0, 3, 70]),
)
def test_the_boundary_is_the_largest_that_all_groups_accept(
    depth: int, groups: dict[int, tuple[Rule, set[int]]], slot: int
) -> None:
    """Found by moving down; here every boundary is tried."""
    rules = {group: rule for group, (rule, _) in groups.items()}
    held = {group: blocks for group, (_, blocks) in groups.items()}
    masks = masks_of(held, bit=1 << slot, rules=rules)

    expected = max(end for end in range(depth + 1) if all(accepts(rules[each], held[each], end) for each in groups))
    assert boundary(range(12), depth, bit=1 << slot, groups=masks, rules=rules) == expected


def test_groups_can_push_one_another_down_to_nothing() -> None:
    """By hand: a window of 2 holds blocks 2,3,6,7 and a checkpoint stands at 6; together they agree on 0 only."""
    rules = {0: Rule(Kind.WINDOW, needed=2), 1: Rule(Kind.WINDOW, needed=1)}
    masks = masks_of({0: {2, 3, 6, 7}, 1: {5}}, bit=1, rules=rules)
    window, checkpoint = {0: masks[0]}, {1: masks[1]}

    assert boundary(range(8), 8, bit=1, groups=window, rules=rules) == 8
    assert boundary(range(8), 7, bit=1, groups=window, rules=rules) == 4
    assert boundary(range(8), 8, bit=1, groups=checkpoint, rules=rules) == 6
    assert boundary(range(8), 8, bit=1, groups=masks, rules=rules) == 0


@pytest.mark.parametrize(
    ("kind", "window_tokens", "eagle", "expected"),
    [
        (
            "sliding_window",
            65,
            False,
            Rule(Kind.WINDOW, 1, 4, 16, window_tokens=65),
        ),  # 64 tokens before the query: 4 blocks of 16
        ("sliding_window", 66, False, Rule(Kind.WINDOW, 1, 5, 16, window_tokens=66)),
        ("sliding_window", 65, True, Rule(Kind.WINDOW, 1, 5, 16, window_tokens=65, behind=1)),
        ("mamba", None, True, Rule(Kind.WINDOW, 1, 1, 16)),
        ("mamba", None, False, Rule(Kind.WINDOW, 1, 1, 16)),
        ("full_attention", None, False, Rule(Kind.DENSE, 1)),
        (None, None, False, Rule(Kind.DENSE, 1)),
        ("cross_attention", None, False, Rule(Kind.UNUSED, 1)),
    ],
)
def test_a_groups_rule_follows_from_its_kind(
    kind: str | None, window_tokens: int | None, eagle: bool, expected: Rule
) -> None:
    """In blocks of 16 tokens: ceil((W-1)/16) of a window, one more with EAGLE, of a state one always."""
    geometry = Geometry(eagle=eagle)

    assert rule_of(kind, window_tokens=window_tokens, block_tokens=16, unit_tokens=16, geometry=geometry) == expected


@pytest.mark.parametrize("window_tokens", [-5, 0, 1 << 62])
def test_a_window_of_no_size_is_taken_for_full_attention(window_tokens: int) -> None:
    """Then a prefix counts only as far as all of its blocks are there."""
    rule = rule_of("sliding_window", window_tokens=window_tokens, block_tokens=16, unit_tokens=16, geometry=Geometry())
    assert rule == Rule(Kind.DENSE, 1)


@pytest.mark.parametrize(
    ("segment_tokens", "kept"),
    [(0, [6, 7]), (1, list(range(12))), (64, list(range(12))), (128, [2, 3, 6, 7, 10, 11]), (256, [6, 7])],
)
def test_windows_keep_the_ends_of_segments_too(segment_tokens: int, kept: list[int]) -> None:
    """``SlidingWindowManager.reachable_block_mask`` of vLLM 0.32 by hand: two blocks of 32 before each place."""
    rule = rule_of("sliding_window", window_tokens=65, block_tokens=32, unit_tokens=32, geometry=Geometry())

    assert list(rule.kept(0, 12, ends={8}, segment_tokens=segment_tokens)) == kept


def test_state_is_kept_once_a_segment() -> None:
    """``MambaManager.reachable_block_mask``: the block that ends with the segment."""
    rule = rule_of("mamba", window_tokens=None, block_tokens=96, unit_tokens=32, geometry=Geometry())

    assert list(rule.kept(0, 18, ends={15}, segment_tokens=192)) == [1, 3, 4, 5]


@pytest.mark.parametrize(
    ("told", "tokens"), [("0", 0), ("256", 256), (256, 256), ("None", 1), (None, None), ("x", None), (-1, None)]
)
def test_what_is_retained_is_told_by_vllms_setting(told: object, tokens: int | None) -> None:
    """None is dense there, which is a segment of any one token; a label that is missing tells nothing."""
    assert retention_of(told) == tokens
