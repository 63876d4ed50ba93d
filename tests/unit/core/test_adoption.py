"""Blocks behind others that nobody has heard of, placed by the prompts that were sent. Blocks of two tokens."""

from __future__ import annotations

from typing import Any

import pytest

from router.core.adoption import Adopted
from router.core.forecast import Pool
from router.core.index import PrefixIndex
from router.core.provisional import Ticket
from router.core.taking_over import MOST_TRIED
from router.wire.block_keys import block_keys, namespace_seed
from router.wire.kv_events import BlockRemoved, BlockStored

TOKENS = tuple(range(100, 112))  # six blocks
OTHER = (*TOKENS[:6], *range(200, 206))  # the same first three, and three others


def keys(tokens: tuple[int, ...], *, unit: int = 2) -> list[int]:
    return block_keys(tokens, block_tokens=unit, parent=namespace_seed("", ""))


def name(tokens: tuple[int, ...]) -> int:
    """An engine's name for the block that ends these tokens."""
    return hash(tokens) & (1 << 64) - 1


def stored(tokens: tuple[int, ...], first: int) -> BlockStored:
    """A prompt's blocks from the ``first`` on; the one before it was stored before anybody listened."""
    names = tuple(name(tokens[: 2 * end]) for end in range(first + 1, len(tokens) // 2 + 1))
    return BlockStored(names, name(tokens[: 2 * first]) if first else None, tokens[2 * first :], 2)


def removed(tokens: tuple[int, ...], *blocks: int) -> BlockRemoved:
    return BlockRemoved(tuple(name(tokens[: 2 * block + 2]) for block in blocks))


def reusable(index: PrefixIndex, tokens: tuple[int, ...]) -> int:
    return index.reusable_tokens(keys(tokens), prompt_tokens=len(tokens) + 1).get(0, 0)


def promise(index: PrefixIndex, tokens: tuple[int, ...]) -> Ticket:
    return index.promise(0, keys(tokens), prompt_tokens=len(tokens) + 1)


@pytest.fixture
def index() -> PrefixIndex:
    index = PrefixIndex(block_tokens=2)
    index.add_rank(0, domain="engine")
    return index


def test_a_prompt_says_where_its_blocks_belong(index: PrefixIndex) -> None:
    """The engine computed the last two of six: the first four it had, and has."""
    ticket = promise(index, TOKENS)
    index.apply(0, stored(TOKENS, 4))
    index.provisional.drop(ticket)

    assert reusable(index, TOKENS) == 12
    assert index.orphans(0) == 0


def test_an_event_that_was_quicker_than_the_prompts_first_token_is_placed_by_it(index: PrefixIndex) -> None:
    """SGLang's prompts count from their first token on; the event has waited for that."""
    index.apply(0, stored(TOKENS, 4))
    assert reusable(index, TOKENS) == 0

    index.provisional.drop(promise(index, TOKENS))
    assert reusable(index, TOKENS) == 12


def test_a_generated_block_is_placed_once_the_answer_is_known(index: PrefixIndex) -> None:
    """The prompt of five blocks was there already: the first that is stored is the answer's."""
    prompt = promise(index, TOKENS[:10])
    index.apply(0, stored(TOKENS, 5))
    assert index.orphans(0) == 1

    answer = index.promise_more(0, keys(TOKENS), start=5)
    index.provisional.drop(prompt)
    index.provisional.drop(answer)
    assert reusable(index, TOKENS) == 12


def test_a_generated_block_is_placed_while_those_behind_it_are_promised(index: PrefixIndex) -> None:
    """Its event comes late: the answer has filled another since."""
    prompt = promise(index, TOKENS[:8])
    first = index.promise_more(0, keys(TOKENS)[:5], start=4)
    second = index.promise_more(0, keys(TOKENS), start=5, behind=first)
    assert [(len(chain.keys), chain.start) for chain in index.provisional.expected(0)] == [(6, 4), (4, None)]
    index.apply(0, stored(TOKENS[:10], 4))
    assert index.orphans(0) == 0

    for ticket in (prompt, first, second):
        index.provisional.drop(ticket)
    assert reusable(index, TOKENS) == 10


def test_other_tokens_find_no_place(index: PrefixIndex) -> None:
    """No position is guessed: the event is not what the prompt would store."""
    ticket = promise(index, TOKENS)
    index.apply(0, stored((*TOKENS[:10], 1, 2), 5))
    index.provisional.drop(ticket)

    assert reusable(index, TOKENS) == 0
    assert index.orphans(0) == 1


def test_an_event_is_held_against_so_many_chains_and_no_more(
    index: PrefixIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those promised last come first; one promised long before all of them is not found."""
    hashed = 0

    def counted(*args: Any, **options: Any) -> list[int]:
        nonlocal hashed
        hashed += 1
        return block_keys(*args, **options)

    monkeypatch.setattr("router.core.adoption.block_keys", counted)
    promise(index, TOKENS)
    others = [(*TOKENS[:8], last, 1, 2, 3) for last in range(1000, 1000 + MOST_TRIED)]
    for other in others:
        promise(index, other)

    index.apply(0, stored(TOKENS, 4))
    assert hashed == MOST_TRIED
    assert index.orphans(0) == 2
    index.apply(0, stored(others[-1], 4))
    assert hashed == MOST_TRIED + 2
    assert index.orphans(0) == 2


def test_a_full_index_takes_nothing_over() -> None:
    """Four blocks before the event's own are more than it may have: the event waits."""
    index = PrefixIndex(block_tokens=2, max_blocks=3)
    index.add_rank(0, domain="engine")
    promise(index, TOKENS)
    index.apply(0, stored(TOKENS, 4))

    assert len(index) == 0
    assert index.orphans(0) == 2


def test_what_was_taken_over_goes_with_the_block_that_named_it(index: PrefixIndex) -> None:
    """Removals of the others will come under names that nobody knows."""
    ticket = promise(index, TOKENS)
    index.apply(0, stored(TOKENS, 4))
    index.provisional.drop(ticket)

    index.apply(0, removed(TOKENS, 5, 4))
    assert reusable(index, TOKENS) == 8
    index.apply(0, removed(TOKENS, 3))
    assert reusable(index, TOKENS) == 0
    assert index.blocks(0) == 0


def test_a_head_stays_as_long_as_one_chain_over_it_does(index: PrefixIndex) -> None:
    """Two conversations share three blocks; one is given up, then the other."""
    tickets = [promise(index, TOKENS), promise(index, OTHER)]
    index.apply(0, stored(TOKENS, 5))
    index.apply(0, stored(OTHER, 5))
    for ticket in tickets:
        index.provisional.drop(ticket)
    assert reusable(index, TOKENS) == reusable(index, OTHER) == 12

    index.apply(0, removed(TOKENS, 5, 4))
    assert reusable(index, TOKENS) == 6
    assert reusable(index, OTHER) == 12
    index.apply(0, removed(OTHER, 5, 4))
    assert reusable(index, OTHER) == 0
    assert index.blocks(0) == 0


def test_a_block_that_is_taken_over_again_vouches_once(index: PrefixIndex) -> None:
    """The event comes twice: a second copy of its own blocks, and still one voucher for those before them."""
    ticket = promise(index, TOKENS)
    index.apply(0, stored(TOKENS, 4))
    index.provisional.drop(ticket)
    index.apply(0, removed(TOKENS, 5, 4, 3))

    ticket = promise(index, TOKENS)
    index.apply(0, stored(TOKENS, 4))
    index.provisional.drop(ticket)
    assert reusable(index, TOKENS) == 12
    index.apply(0, removed(TOKENS, 5, 4, 3))
    assert index.blocks(0) == 0
    assert not index._ranks[0].adopted.vouchers


def test_a_thousand_conversations_are_taken_over_in_time_linear_in_their_blocks() -> None:
    """What one is behind is counted, not looked for among all others: reads of what stands with others stay few."""

    class Counted(dict[int, list[int]]):
        walks = 0

        def values(self) -> Any:
            Counted.walks += 1
            return super().values()

    adopted = Adopted(before=Counted())
    for place in range(1000):
        adopted.take(1_000_000 + place, range(5), new=range(5) if not place else ())
    for place in range(1000):
        lost = adopted.let_go(1_000_000 + place)
        assert list(lost) == ([0, 1, 2, 3, 4] if place == 999 else [])
    assert not Counted.walks


def test_what_a_window_needs_is_there_where_a_prompt_was_resumed(index: PrefixIndex) -> None:
    """A window of two blocks: the engine went on after four, so it has the last two of them; of the new ones it keeps
    the last."""
    index.apply(0, BlockStored((), 7, TOKENS[:2], 2, group=1, kind="sliding_window", window_tokens=5))
    ticket = promise(index, TOKENS)
    index.apply(0, stored(TOKENS, 4))
    index.provisional.drop(ticket)

    assert reusable(index, TOKENS[:10]) == 8
    index.apply(0, BlockStored((name(TOKENS),), name(TOKENS[:8]), TOKENS[8:], 2, group=1, kind="sliding_window"))
    assert reusable(index, TOKENS) == 8  # of the two blocks before twelve tokens one is lacking

    index.apply(0, removed(TOKENS, 5, 4, 3))
    assert reusable(index, TOKENS) == 0


# --- what the engine says it has reused ----------------------------------------------------------------------------


def listening(*, pool: Pool | None = None) -> PrefixIndex:
    """An index that has heard of one block, which is gone."""
    index = PrefixIndex(block_tokens=2)
    index.add_rank(0, domain="engine", pool=pool)
    index.apply(0, stored((1, 1), 0))
    index.apply(0, removed((1, 1), 0))
    return index


def test_what_the_engine_has_reused_is_there() -> None:
    """Nobody ever heard of four blocks that an answer was resumed behind."""
    index = listening()
    index.reused(0, keys(TOKENS), tokens=8)

    assert reusable(index, TOKENS) == 8
    assert index.blocks(0) == 4


def test_what_was_reused_counts_from_the_first_event_on(index: PrefixIndex) -> None:
    """A worker that never tells of its cache would never tell either that a block is gone."""
    index.reused(0, keys(TOKENS), tokens=8)
    assert reusable(index, TOKENS) == 0

    index.apply(0, stored((1, 1), 0))
    assert reusable(index, TOKENS) == 8


def test_an_unbroken_picture_has_no_gaps() -> None:
    """What is reused of it is no news; a block that is removed and was never heard of is."""
    index = listening()
    assert not index.has_gaps(0)
    index.apply(0, BlockRemoved((77,)))
    assert index.has_gaps(0)


def test_what_was_reused_has_what_a_window_needs(index: PrefixIndex) -> None:
    """A window of two blocks: the last two of four are there, so a prompt that forks after three is not resumed."""
    index.apply(0, BlockStored((), 7, TOKENS[:2], 2, group=1, kind="sliding_window", window_tokens=5))
    index.apply(0, stored((1, 1), 0))
    index.reused(0, keys(TOKENS), tokens=8)

    assert reusable(index, TOKENS) == 8
    assert reusable(index, OTHER) == 0


def test_a_window_that_is_met_later_is_there_too(index: PrefixIndex) -> None:
    """The first event of the window's group comes after the engine has said what it reused."""
    index.apply(0, stored((1, 1), 0))
    index.reused(0, keys(TOKENS), tokens=8)
    index.apply(0, BlockStored((), 7, TOKENS[:2], 2, group=1, kind="sliding_window", window_tokens=5))

    assert reusable(index, TOKENS) == 8


def test_a_block_without_a_name_goes_when_all_that_nobody_knows_may_have_gone() -> None:
    """A pool of ten blocks, four of them known: of the six others that were there, one may be of before."""
    index = listening(pool=Pool(10))
    index.reused(0, keys(TOKENS), tokens=8)
    for unknown in range(6):
        index.apply(0, BlockRemoved((unknown,)))
    assert reusable(index, TOKENS) == 8

    index.apply(0, BlockRemoved((7,)))
    assert reusable(index, TOKENS) == 0
    assert index.blocks(0) == 0


def test_no_size_is_learnt_while_there_are_blocks_that_nobody_knows() -> None:
    """One of four blocks goes, after one of before: the pool holds more than those four."""
    pool = Pool(None)
    index = PrefixIndex(block_tokens=2)
    index.add_rank(0, domain="engine", pool=pool)
    index.apply(0, stored(TOKENS[:8], 0))
    index.apply(0, BlockRemoved((77,)))
    index.apply(0, removed(TOKENS, 3))
    assert pool.blocks is None

    index = listening(pool=(pool := Pool(None)))
    index.apply(0, stored(TOKENS[:8], 0))
    index.apply(0, removed(TOKENS, 3))
    assert pool.blocks == 4


def test_a_block_that_is_stored_after_all_is_no_second_copy() -> None:
    """The engine had lost it and computes it again: now it has a name, and one removal takes it."""
    index = listening()
    index.reused(0, keys(TOKENS), tokens=8)
    index.apply(0, stored(TOKENS, 0))
    assert reusable(index, TOKENS) == 12

    index.apply(0, removed(TOKENS, 5, 4, 3, 2, 1, 0))
    assert reusable(index, TOKENS) == 0
    assert index.blocks(0) == 0


def test_a_name_that_comes_later_takes_a_reused_prefix_over() -> None:
    """The answer's first block is stored behind it: from then on it goes with the block that is named."""
    index = listening()
    index.reused(0, keys(TOKENS), tokens=8)
    promise(index, TOKENS)
    index.apply(0, stored(TOKENS, 4))
    assert not index._ranks[0].adopted.nameless

    index.provisional.forget(0)
    index.apply(0, removed(TOKENS, 5, 4, 3))
    assert reusable(index, TOKENS) == 0
    assert index.blocks(0) == 0


def test_what_is_stored_behind_blocks_shows_that_they_are_there(index: PrefixIndex) -> None:
    """Of blocks that were taken over there may be several copies: with one that is removed not all are gone."""
    ticket = promise(index, TOKENS[:10])
    index.apply(0, stored(TOKENS[:10], 2))
    index.provisional.drop(ticket)
    index.apply(0, removed(TOKENS, 1))
    assert reusable(index, TOKENS) == 0

    index.apply(0, BlockStored((name(TOKENS),), name(TOKENS[:10]), TOKENS[10:], 2))
    assert reusable(index, TOKENS) == 12
