"""A runner without a model: it writes a fingerprint of the prefix where keys and values would go, and reads it back.

A recurrent state is the position it stands for and the fingerprint there. Where there is room for drafts it tries some,
most of them right, and writes them all. What stands at a position depends on all tokens up to it, and the sampled token
on what stands at the last one. So a wrong page, a page reused too early or a table that is one slot off is a wrong
fingerprint at once, and the right output can be told without any cache: ``expected_output``.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary
from zlib import crc32

from engine_shim.types import (
    NULL_PAGE,
    Batch,
    CacheGroup,
    CacheLayout,
    Chunk,
    FinishReason,
    GroupKind,
    Request,
    Sampled,
    Sampling,
    StepLanding,
)

VOCABULARY = 11
EOS = 0


def fingerprint(before: int, token: int) -> int:
    """The fingerprint of a prefix one token longer."""
    return hash((before, token))


def sample(value: int) -> int:
    """The token that follows a prefix."""
    return value % VOCABULARY


def expected_output(
    prompt: tuple[int, ...], sampling: Sampling, *, namespace: str = "", context_tokens: int = 10**9
) -> tuple[list[int], FinishReason]:
    """What a request must answer, worked out with nothing but the rule above."""
    value = crc32(namespace.encode())
    for token in prompt:
        value = fingerprint(value, token)
    output: list[int] = []
    while True:
        token = sample(value)
        output.append(token)
        value = fingerprint(value, token)
        if token in sampling.stop_token_ids or (token == EOS and not sampling.ignore_eos):
            return output, FinishReason.STOP
        if len(output) == sampling.max_tokens or len(prompt) + len(output) == context_tokens:
            return output, FinishReason.LENGTH


class KvMemory:
    """Slots (group, page, offset) -> (position, fingerprint); implements ``LaunchingRunner``.

    A launched step runs as late as it can: when it has to land, or ``hurry`` has all that is launched run. A token that
    a chunk awaits is the one sampled last for its request, which stays here.
    """

    def __init__(self, layout: CacheLayout, *, seed: int = 0) -> None:
        self.layout = layout
        self.slots: dict[tuple[int, int, int], tuple[int, int]] = {}
        self.host: dict[tuple[int, int, int], tuple[int, int]] = {}
        self.host_reads = 0
        self.window_pages_reused = 0
        self.ran_ahead = 0
        self._launched: deque[list[Any]] = deque()
        self._last: WeakKeyDictionary[Request, int] = WeakKeyDictionary()
        self._known: dict[tuple[str, str], list[int]] = {}
        self._rng = random.Random(seed)

    def run(self, batch: Batch) -> list[Sampled]:
        """Write all chunks, then read all that their queries look at, then sample."""
        assert not self._launched, "a step is run past those that were launched before"
        return self._run(batch)

    def launch(self, batch: Batch) -> StepLanding:
        """Queue a step."""
        step: list[Any] = [batch, None]
        self._launched.append(step)
        return lambda: self._results(step)

    def hurry(self) -> None:
        """Run all that is launched."""
        while self._launched:
            step = self._launched.popleft()
            step[1] = self._run(step[0])

    def forget(self) -> None:
        """What is launched and has not run never will."""
        self._launched.clear()

    def _results(self, step: list[Any]) -> list[Sampled]:
        while step[1] is None:
            first = self._launched.popleft()
            first[1] = self._run(first[0])
        return step[1]

    def _run(self, batch: Batch) -> list[Sampled]:
        written: set[tuple[int, int, int]] = set()
        sampled = []
        runs = [(chunk, self._drafts(chunk)) for chunk in batch.chunks]
        for chunk, drafts in runs:
            self._write(chunk, drafts, written)
        for chunk, drafts in runs:
            self._read(chunk, drafts)
            if chunk.samples:
                sampled.append(Sampled(self._sampled(chunk, drafts), drafted=len(drafts)))
                self._last[chunk.request] = sampled[-1].tokens[-1]
        return sampled

    def scribble(self, batch: Batch) -> None:
        """Fill the slots of a batch with what belongs nowhere."""
        for chunk in batch.chunks:
            for group in self.layout.groups:
                if group.kind is GroupKind.STATE:
                    self.slots[group.index, chunk.tables[group.index][1], 0] = (-1, -1)
                    continue
                for position in self._own(chunk, group, chunk.count + chunk.room):
                    self.slots[self._slot(chunk, group.index, position)] = (-1, -1)

    def _drafts(self, chunk: Chunk) -> list[int]:
        value = self._fingerprints(chunk)[-1]
        drafts: list[int] = []
        for _ in range(self._rng.randint(0, chunk.room)):
            drafts.append(sample(value) if self._rng.random() < 0.8 else self._rng.randrange(VOCABULARY))
            value = fingerprint(value, drafts[-1])
        return drafts

    def _sampled(self, chunk: Chunk, drafts: list[int]) -> tuple[int, ...]:
        """The drafts that are right, and the token after them."""
        value = self._fingerprints(chunk)[chunk.start + chunk.count - 1]
        tokens = [sample(value)]
        for draft in drafts:
            if draft != tokens[-1]:
                break
            value = fingerprint(value, draft)
            tokens.append(sample(value))
        return tuple(tokens)

    def _write(self, chunk: Chunk, drafts: list[int], written: set[tuple[int, int, int]]) -> None:
        prints = self._fingerprints(chunk, drafts)
        for group in self.layout.groups:
            if group.kind is GroupKind.STATE:
                held = len(self._sampled(chunk, drafts)) - 1 if chunk.samples else 0
                self._run_state(chunk, group.index, prints, written, end=chunk.start + chunk.count + held)
                continue
            seen = {page for page in chunk.tables[group.index] if page != NULL_PAGE}
            assert len(seen) == sum(page != NULL_PAGE for page in chunk.tables[group.index])
            for position in self._own(chunk, group, chunk.count + len(drafts)):
                slot = self._slot(chunk, group.index, position)
                assert slot not in written, "two chunks write one slot"
                written.add(slot)
                if group.kind is GroupKind.WINDOW and slot in self.slots:
                    self.window_pages_reused += self.slots[slot][0] != position
                self.slots[slot] = (position, prints[position])

    def _read(self, chunk: Chunk, drafts: list[int]) -> None:
        prints = self._fingerprints(chunk, drafts)
        for group in self.layout.groups:
            if group.kind is GroupKind.STATE:
                continue  # read before it was written
            first = 0
            if group.window_tokens is not None:
                first = max(chunk.window_start, chunk.start - group.window_tokens + 1)
            for position in range(first, chunk.start + chunk.count + len(drafts)):
                found = self._found(chunk, group, position)
                assert found == (position, prints[position]), f"group {group.index} position {position}"

    def _run_state(
        self, chunk: Chunk, group: int, prints: list[int], written: set[tuple[int, int, int]], *, end: int
    ) -> None:
        """Read the state before the chunk, write the one at its end; a state that others read is left alone."""
        source, target = chunk.tables[group]
        assert (source == NULL_PAGE) == (chunk.start == 0)
        assert target != NULL_PAGE
        if chunk.start > 0:
            assert self.slots[group, source, 0] == (chunk.start, prints[chunk.start - 1]), f"state at {chunk.start}"
            assert (group, source, 0) not in written or source == target
        assert (group, target, 0) not in written, "two chunks write one state"
        written.add((group, target, 0))
        self.slots[group, target, 0] = (end, prints[end - 1])

    def _own(self, chunk: Chunk, group: CacheGroup, count: int) -> range:
        """The positions that are written."""
        start = chunk.start if group.kind is GroupKind.WINDOW else max(chunk.start, chunk.rebuilt_until)
        return range(start, chunk.start + count)

    def _found(self, chunk: Chunk, group: CacheGroup, position: int) -> tuple[int, int]:
        """What stands at a position, on the device or, of what has sunk, on the host."""
        page, sunk = position // self.layout.page_tokens, chunk.sunk
        if group.kind is not GroupKind.FULL or sunk is None or not sunk.first <= page < sunk.end:
            return self.slots[self._slot(chunk, group.index, position)]
        self.host_reads += 1
        assert chunk.tables[group.index][page] == NULL_PAGE
        return self.host[group.index, sunk.slots[page - sunk.first], position % self.layout.page_tokens]

    def _slot(self, chunk: Chunk, group: int, position: int) -> tuple[int, int, int]:
        page = chunk.tables[group][position // self.layout.page_tokens]
        assert page != NULL_PAGE, f"position {position} has no page in group {group}"
        return group, page, position % self.layout.page_tokens

    def _fingerprints(self, chunk: Chunk, drafts: Sequence[int] = ()) -> list[int]:
        """What stands at each position of the request's tokens, and of what the chunk awaits and drafts behind them."""
        request = chunk.request
        if chunk.awaits_token:
            assert chunk.count == 1
            assert chunk.start <= len(request.tokens)
            if chunk.start == len(request.tokens):
                self.ran_ahead += 1
                drafts = (self._last[request], *drafts)
            else:
                assert request.tokens[chunk.start] == self._last[request]
        prints = self._known.setdefault((request.namespace, request.id), [])
        value = prints[-1] if prints else crc32(request.namespace.encode())
        for token in request.tokens[len(prints) :]:
            value = fingerprint(value, token)
            prints.append(value)
        behind = []
        for token in drafts:
            value = fingerprint(value, token)
            behind.append(value)
        return prints + behind
