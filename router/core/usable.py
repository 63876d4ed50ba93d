"""From what is resident to what can be reused: the rules of each attention kind, as functions.

Lengths are counted in *units*, the index's own block size. A group whose blocks are larger has a stride: its block j
ends at unit ``(j+1) * stride`` and is named by the chain key of its last unit.

- Dense (full attention, MLA): all blocks from the start.
- Sliding window W: the last ceil((W-1)/block) blocks before the boundary; a run that reaches back to block 0 counts
  however short.
- Recurrent state: a checkpoint at the very boundary, which is a window of one block.
- Chunked local attention: the blocks from the last chunk boundary on.
- Several groups: the largest boundary all of them accept, a fixed point.
- EAGLE: the last block that full attention finds is computed again. A window needs one block more, behind the
  boundary; recurrent state, of which drafts have none, does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

#: Slot bits of one block, by its key; None is none, so that ``dict.get`` is such a function.
Mask = Callable[[int], int | None]


class Kind(StrEnum):
    """How a group's blocks serve a prefix."""

    DENSE = "dense"
    WINDOW = "window"
    CHUNK = "chunk"
    UNUSED = "unused"  # encoder or cross attention: no part of a prompt's prefix


@dataclass(frozen=True, slots=True)
class Geometry:
    """The little that no event stream carries, as a model's setting."""

    chunk_tokens: int | None = None
    eagle: bool = False


@dataclass(frozen=True, slots=True)
class Rule:
    """What one group of one rank asks for. ``needed`` is in blocks (window) or tokens (chunk).

    ``window_tokens`` are those that a query sees, itself included; 0 for recurrent state, which is of the last alone.
    Of the blocks that are needed ``behind`` lie behind the boundary (EAGLE).
    """

    kind: Kind
    stride: int = 1
    needed: int = 0
    unit_tokens: int = 1
    window_tokens: int = 0
    behind: int = 0

    @property
    def is_state(self) -> bool:
        """Whether a block is the state behind all tokens before, and a request holds the last one alone."""
        return self.kind is Kind.WINDOW and not self.window_tokens

    def first_held(self, tokens: int, *, block_tokens: int) -> int:
        """The first block that a request holds on to, of which so many tokens are computed."""
        match self.kind:
            case Kind.WINDOW:
                return max(0, tokens - (self.window_tokens or 2) + 1) // block_tokens
            case Kind.CHUNK:
                return tokens // self.needed * self.needed // block_tokens
            case _:
                return 0

    def first_needed(self, end: int) -> int:
        """The first block that must be held for a boundary after ``end`` blocks."""
        match self.kind:
            case Kind.WINDOW:
                return max(0, end + self.behind - self.needed)
            case Kind.CHUNK:
                block_tokens = self.stride * self.unit_tokens
                return end * block_tokens // self.needed * self.needed // block_tokens
            case Kind.DENSE:
                return 0
            case Kind.UNUSED:
                return end

    def needed_at(self, boundary: int) -> Sequence[int]:
        """The last units of the blocks that must be held for a boundary after so many units."""
        end = boundary // self.stride
        return [(block + 1) * self.stride - 1 for block in range(self.first_needed(end), end + self.behind)]

    def kept(self, start: int, end: int, *, ends: Collection[int], segment_tokens: int) -> Sequence[int]:
        """The blocks that a request leaves in the cache of those it computes, from unit ``start`` to ``end``.

        A window group keeps what lies before the units ``ends`` and, unless ``segment_tokens`` is 0, before the end of
        each segment of so many tokens (``SlidingWindowManager.reachable_block_mask``).
        """
        first, last = start // self.stride, end // self.stride
        if self.kind in (Kind.DENSE, Kind.CHUNK):
            return range(first, last)
        kept: set[int] = set()
        if self.kind is Kind.WINDOW:
            if segment_tokens:
                segment = segment_tokens // (self.stride * self.unit_tokens)
                if self.needed >= segment:
                    return range(first, last)
                start = max(first, self.behind)
                tail = range(segment - self.needed, segment)
                kept.update(block for block in range(start, last) if (block - self.behind) % segment in tail)
            for place in ends:
                block = place // self.stride
                kept.update(range(max(first, self.first_needed(block)), min(last, block + self.behind)))
        return sorted(kept)


#: No model sees so far; what claims to is no window.
_MAX_WINDOW_TOKENS = 1 << 31

_KINDS = {
    None: Kind.DENSE,
    "full_attention": Kind.DENSE,
    "mla_attention": Kind.DENSE,
    "sink_full_attention": Kind.DENSE,
    "sliding_window": Kind.WINDOW,
    "sliding_window_mla": Kind.WINDOW,
    "mamba": Kind.WINDOW,
    "chunked_local_attention": Kind.CHUNK,
}


def retention_of(told: object) -> int | None:
    """Before the end of segments of how many tokens windows and states are kept, by vLLM's setting
    ``prefix_cache_retention_interval``, of which None stands for all blocks. None where nothing is told.
    """
    if told == "None":
        return 1
    if isinstance(told, str) and told.isdecimal():
        return int(told)
    return told if isinstance(told, int) and not isinstance(told, bool) and told >= 0 else None


def resumed_behind(same: int, longer: int, *, is_eagle: bool, is_state: bool) -> set[int]:
    """Behind how many blocks a later request can go on from a prompt: each group keeps what that takes. The ``same``
    prompt has so many whole blocks before its last token, a ``longer`` one that begins with it so many of it.

    Without EAGLE that is one place. With it a longer prompt gets further where the prompt ends with a block; of state
    there is only what the engine's last step but one computes (``replay_boundaries``,
    ``get_mamba_prefill_checkpoint_position``).
    """
    if not is_eagle:
        return {same}
    return {max(0, end - 1) for end in ((longer,) if is_state else (same, longer))}


def rule_of(
    kind: str | None, *, window_tokens: int | None, block_tokens: int, unit_tokens: int, geometry: Geometry
) -> Rule:
    """The rule of a group, from what its events say. ``window_tokens`` counts the query itself (vLLM's number)."""
    stride = block_tokens // unit_tokens
    match _KINDS.get(kind, Kind.UNUSED):
        case Kind.WINDOW if window_tokens is None or 0 < window_tokens <= _MAX_WINDOW_TOKENS:
            blocks = -(-(window_tokens - 1) // block_tokens) if window_tokens else 1
            behind = int(geometry.eagle and window_tokens is not None)
            needed = max(1, blocks) + behind
            return Rule(Kind.WINDOW, stride, needed, unit_tokens, window_tokens=window_tokens or 0, behind=behind)
        case Kind.CHUNK if geometry.chunk_tokens:
            return Rule(Kind.CHUNK, stride, geometry.chunk_tokens, unit_tokens)
        case Kind.DENSE | Kind.CHUNK | Kind.WINDOW:  # a chunk of unknown size, or no window, is taken for all there is
            return Rule(Kind.DENSE, stride)
        case other:
            return Rule(other, stride)


def slots_of(mask: int) -> Iterator[int]:
    """The slots whose bits are set, lowest first."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def boundary(
    keys: Sequence[int],
    depth: int,
    *,
    bit: int,
    groups: Mapping[int, Mask],
    rules: Mapping[int, Rule],
    align: int = 1,
    recomputed: int = 0,
) -> int:
    """The largest boundary at or below ``depth`` units, a multiple of ``align``, that every group accepts. Of what
    full attention finds the last ``recomputed`` units are computed again.

    Groups of one rule are looked at together. What lies behind a boundary is asked for once: if another group accepts
    less, windows are judged there without it (``HybridKVCacheCoordinator.find_longest_cache_hit``).
    """
    alike = [(rules[group], [mask]) for group, mask in groups.items() if rules[group].kind is not Kind.UNUSED]
    if recomputed:
        together: dict[Rule, list[Mask]] = {}
        for rule, masks in alike:
            together.setdefault(rule, []).extend(masks)
        alike = list(together.items())
    for rule, masks in alike:
        if rule.kind is Kind.DENSE:
            depth, align = (
                _accepted(keys, depth, bit=bit, masks=masks, rule=rule, align=1),
                math.lcm(align, rule.stride),
            )
    depth = max(0, depth - recomputed)
    depth -= depth % align
    agreed, looked_behind = -1, set[Rule]()
    while depth != agreed:
        agreed = depth
        for rule, masks in alike:
            if rule.kind is Kind.DENSE:
                continue
            is_first = rule.behind > 0 and rule not in looked_behind
            asked = rule if is_first or not rule.behind else replace(rule, needed=rule.needed - rule.behind, behind=0)
            found = _accepted(keys, depth, bit=bit, masks=masks, rule=asked, align=align)
            if is_first:
                looked_behind.add(rule)
            elif found < depth and looked_behind:
                looked_behind.clear()
            depth = found
    return depth


def _accepted(keys: Sequence[int], depth: int, *, bit: int, masks: Sequence[Mask], rule: Rule, align: int) -> int:
    """The largest aligned boundary at or below ``depth`` that groups of one rule accept."""
    stride, behind = rule.stride, rule.behind
    step = math.lcm(align, stride) // stride  # blocks from one boundary to the next
    end = depth // stride // step * step

    def held(start: int, stop: int) -> list[int]:
        names = keys[(start + 1) * stride - 1 : stop * stride : stride]
        found = [(value or 0) & bit for value in map(masks[0], names)]
        for mask in masks[1:]:
            found = [old and (mask(key) or 0) & bit for old, key in zip(found, names, strict=True)]
        return found

    if rule.kind is Kind.WINDOW:
        if behind and end + behind > (whole := len(keys) // stride):  # what is behind the end nobody can have
            if whole < behind:
                return 0
            end = (whole - behind) // step * step
        first = stop = end = end + behind
        while first and end - first < rule.needed:  # below are those not looked at yet
            first, stop = max(0, end - rule.needed), first
            for block, is_held in zip(range(stop - 1, first - 1, -1), reversed(held(first, stop)), strict=True):
                if not is_held and block < end:
                    end = behind + (block - behind) // step * step if block >= behind else 0
        if behind and end < rule.needed:  # a run from the very start: it is cut to whole steps before and after
            end = end // step * step
        end = max(0, end - behind)
        end -= end % step
    else:
        first = rule.first_needed(end)
        missing = next((block for block, is_held in enumerate(held(first, end), first) if not is_held), end)
        end = missing - missing % step
    return end * stride
