"""The index against an oracle that keeps, for each rank, the token sequences it holds and nothing clever."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from router.core.index import PrefixIndex
from router.wire.block_keys import block_keys, namespace_seed
from router.wire.kv_events import AllBlocksCleared, BlockRemoved, BlockStored

BLOCK = 2
WINDOW_GROUP = 0
DENSE_GROUP = 1
Prompt = tuple[int, ...]
#: Few long conversations that share heads and fork: every lookup meets what the steps did.
CONVERSATIONS: tuple[Prompt, ...] = tuple(
    tuple(token for block in blocks for token in (int(block), 9)) for blocks in ("111111", "111222", "122222", "2111")
)
PROMPTS = st.tuples(st.sampled_from(CONVERSATIONS), st.integers(1, 6)).map(lambda pair: pair[0][: BLOCK * pair[1]])
SALTS = st.sampled_from(["", "tenant"])


def name_of(salt: str, prefix: Prompt) -> int:
    """An engine's name for a block: anything that is unique to the content before and in it."""
    return int.from_bytes(bytes([len(salt), *prefix[::BLOCK]]))


def prompts() -> Iterator[tuple[str, Prompt]]:
    """Each conversation under each salt, with and without a partial last block."""
    for salt in ("", "tenant"):
        for conversation in CONVERSATIONS:
            yield from ((salt, conversation), (salt, (*conversation, 5)))


class IndexMachine(RuleBasedStateMachine):
    """Random stores, twins, removals, holes, clears and late parents on three ranks, two of them with a window."""

    @initialize(window=st.sampled_from([2, 3, 4, 5, 7]), is_thinned=st.booleans())
    def start(self, window: int, is_thinned: bool) -> None:
        """A window group keeps all its blocks, or no more than lie before two places of a prompt."""
        self.window = window
        self.most_kept = 2 * -(-(window - 1) // BLOCK) if is_thinned else None
        self.windowed = {0: True, 1: True, 2: False}
        self.index = PrefixIndex(block_tokens=BLOCK)
        self.held: dict[int, Counter[tuple[int, str, Prompt]]] = {slot: Counter() for slot in self.windowed}
        for slot in self.windowed:
            self.index.add_rank(slot, domain="engine")

    def store(
        self, slot: int, salt: str, prompt: Prompt, *, start: int, group: int, kept: list[int] | None = None
    ) -> None:
        """Announce blocks [start, end) of a prompt; a window group may keep only some of them."""
        ends = list(range(BLOCK * (start + 1), len(prompt) + 1, BLOCK))
        if kept is not None:
            ends = [end for place, end in enumerate(ends) if place in kept]
        windowed = self.windowed[slot]
        event = BlockStored(
            hashes=tuple(name_of(salt, prompt[:end]) for end in ends),
            parent=name_of(salt, prompt[: BLOCK * start]) if start else None,
            token_ids=list(prompt[BLOCK * start :]),
            block_tokens=BLOCK,
            group=group,
            kind="sliding_window" if group == WINDOW_GROUP else "full_attention" if windowed else None,
            window_tokens=self.window if group == WINDOW_GROUP else None,
            extra_keys=((salt,),) + (None,) * (len(ends) - 1) if salt and not start and ends else None,
        )
        self.index.apply(slot, event)
        for end in ends:
            self.held[slot][group, salt, prompt[:end]] += 1

    @rule(slot=st.sampled_from([0, 1, 2]), salt=SALTS, prompt=PROMPTS, data=st.data())
    def store_new_tail(self, slot: int, salt: str, prompt: Prompt, data: st.DataObject) -> None:
        """The usual step: the blocks a rank lacks, after the ones it has; the window's first, as vLLM sends them."""
        blocks = len(prompt) // BLOCK
        have = 0
        while have < blocks and self.held[slot][DENSE_GROUP, salt, prompt[: BLOCK * (have + 1)]]:
            have += 1
        # Mostly right after the prefix it has; at times recomputed from earlier, or after a block beyond a hole.
        after = [n for n in range(1, blocks) if self.held[slot][DENSE_GROUP, salt, prompt[: BLOCK * n]]]
        start = data.draw(st.just(have) | st.integers(0, have) | st.sampled_from(after or [0]), label="from")
        if start == blocks:
            return
        if self.windowed[slot]:
            kept = list(range(blocks))
            if self.most_kept is not None:
                places = st.lists(st.integers(0, blocks - 1), unique=True, max_size=self.most_kept)
                kept = data.draw(places, label="window keeps")
            self.store(slot, salt, prompt, start=start, group=WINDOW_GROUP, kept=kept)
        self.store(slot, salt, prompt, start=start, group=DENSE_GROUP)

    @rule(slot=st.sampled_from([0, 1]), salt=SALTS, prompt=PROMPTS)
    def tell_what_was_found(self, slot: int, salt: str, prompt: Prompt) -> None:
        """vLLM's full report: each group names all blocks that a prompt is resumed behind, held or not."""
        found = self.usable(slot, salt, (*prompt, 5)) // BLOCK
        if (
            self.most_kept is None
            or found <= max(1, self.most_kept)
            or self.index._ranks[slot].segment_tokens.get(WINDOW_GROUP, 1)
        ):
            return
        before = Counter(self.held[slot])
        for group in (WINDOW_GROUP, DENSE_GROUP):
            self.store(slot, salt, prompt[: found * BLOCK], start=0, group=group)
        self.held[slot] = before

    @rule(slot=st.sampled_from([0, 1, 2]), data=st.data())
    def remove_any(self, slot: int, data: st.DataObject) -> None:
        """A copy of any block goes, inner ones too: holes are allowed."""
        copies = sorted((key for key, count in self.held[slot].items() if count > 0), key=repr)
        if not copies:
            return
        group, salt, prefix = copy = data.draw(st.sampled_from(copies))
        self.index.apply(slot, BlockRemoved(hashes=(name_of(salt, prefix),), group=group))
        self.held[slot][copy] -= 1

    @rule(slot=st.sampled_from([0, 1, 2]))
    def clear(self, slot: int) -> None:
        """The rank's cache was reset."""
        self.index.apply(slot, AllBlocksCleared())
        self.held[slot].clear()

    @rule(slot=st.sampled_from([0, 1, 2]))
    def leave_and_return(self, slot: int) -> None:
        """The rank leaves; another takes its slot."""
        self.index.remove_rank(slot)
        self.index.add_rank(slot, domain="engine")
        self.held[slot].clear()

    @rule(steps=st.integers(1, 4))
    def let_go(self, steps: int) -> None:
        """Some of what is to be let go of, between other steps."""
        self.index.sweep_soon()
        self.index.tidy(steps)

    def usable(self, slot: int, salt: str, prompt: Prompt) -> int:
        """By the definition: the largest boundary with all dense blocks and the window's last ones before it."""
        held = self.held[slot]
        needed = -(-(self.window - 1) // BLOCK)
        for blocks in range((len(prompt) - 1) // BLOCK, 0, -1):
            prefixes = [prompt[: BLOCK * (number + 1)] for number in range(blocks)]
            dense = all(held[DENSE_GROUP, salt, prefix] > 0 for prefix in prefixes)
            tail = prefixes[max(0, blocks - needed) :]
            window = not self.knows_window(slot) or all(held[WINDOW_GROUP, salt, prefix] > 0 for prefix in tail)
            if dense and window:
                return blocks * BLOCK
        return 0

    def knows_window(self, slot: int) -> bool:
        return bool(self.index._ranks[slot].rules)

    @invariant()
    def every_prompt_is_judged_right(self) -> None:
        """What each rank can reuse of each conversation, with and without a partial last block."""
        if not hasattr(self, "held"):
            return
        for salt, prompt in prompts():
            expected = {slot: tokens for slot in self.held if (tokens := self.usable(slot, salt, prompt))}
            assert self.reusable(salt, prompt) == expected

    def reusable(self, salt: str, prompt: Prompt) -> dict[int, int]:
        """What the index says of a prompt."""
        keys = block_keys(prompt, block_tokens=BLOCK, parent=namespace_seed("", salt))
        return self.index.reusable_tokens(keys, prompt_tokens=len(prompt))

    def held_keys(self, slot: int) -> dict[int, set[int]]:
        """What a rank holds, by group as the index numbers them: -1 is the dense one."""
        found: dict[int, set[int]] = {-1: set(), WINDOW_GROUP: set()}
        for (group, salt, prefix), count in self.held[slot].items():
            if count > 0:
                key = block_keys(prefix, block_tokens=BLOCK, parent=namespace_seed("", salt))[-1]
                found[-1 if group == DENSE_GROUP else group].add(key)
        return found

    @invariant()
    def residency_is_exact(self) -> None:
        """Every block held, in every group, and not one more."""
        if not hasattr(self, "held"):
            return
        for slot in self.held:
            expected, residency = self.held_keys(slot), self.index.residency(slot)
            assert set(residency[-1]) == expected[-1]
            assert set(residency.get(WINDOW_GROUP, frozenset())) == expected[WINDOW_GROUP]
            assert self.index.blocks(slot) == len(expected[-1])

    @invariant()
    def nothing_outlives_its_blocks(self) -> None:
        """An index that holds nothing has no copy counts and, after a sweep, no names or links."""
        if hasattr(self, "held") and not any(count > 0 for held in self.held.values() for count in held.values()):
            self.index.sweep()
            assert not any(table.masks or table._more for table in self.index._sparse.values())
            assert not any(chains._firsts or chains._copies for chains in self.index._chains.values())
            assert not self.index._runs.by_number
            assert not any(names.places or names.strays or names.others for names in self.index._names.values())
            assert len(self.index) == 0


IndexMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestIndexMachine = IndexMachine.TestCase
