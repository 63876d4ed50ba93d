"""A shadow of the cache: what every slot should hold, checked against what a step is about to read.

Beside the real keys and values stands, for each slot, which token was written there, at which position, with what
before it, and how often its page had been handed out by then. A page freed too early, a table that is one slot off, two
writers of one page or a state of another request then show as a ``ShadowError`` at the step that would have used them,
not as a slightly wrong answer. Costs a few bytes a slot and some arithmetic, no look at the values themselves.
Idea: SGLang's ``kv_canary``.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import partial
from itertools import compress
from typing import NoReturn, cast

import numpy as np
import numpy.typing as npt

from engine_shim.cache.integrity import IntegrityError
from engine_shim.types import (
    NULL_PAGE,
    Batch,
    CacheGroup,
    CacheLayout,
    Chunk,
    GroupKind,
    LaunchingRunner,
    Runner,
    Sampled,
    StepLanding,
    Sunk,
)
from router.wire.block_keys import namespace_seed

Integers = npt.NDArray[np.int64]
#: So much of a context is checked at once in service.
SAMPLE_TOKENS = 2048
_UNWRITTEN = -1
#: Knuth's multiplier for 64 bits; arithmetic with it wraps.
_FACTOR = 6364136223846793005
_FACTORS = (_FACTOR, pow(_FACTOR, -1, 1 << 64))


class ShadowError(IntegrityError):
    """A step reads, or has overwritten, something else than it believes; the message says what and where."""


def seed_of(namespace: str) -> int:
    """The name of a namespace's empty prefix."""
    return namespace_seed(namespace) >> 1


def chains(previous: int, tokens: Sequence[int] | Integers) -> Integers:
    """The names of the prefixes that are one token longer each than the one before: its name by a factor, plus a token.

    Multiplied out, so that all of them are one sum.
    """
    own = np.array(tokens, dtype=np.int64)
    powers, inverses = (np.cumprod(np.full(len(own), factor, dtype=np.uint64)).view(np.int64) for factor in _FACTORS)
    names: Integers = powers * (np.cumsum(own * inverses) + previous)
    return names


class Slots:
    """What the slots of one group hold: token, position, the chain up to it, and the page's generation when written."""

    def __init__(self, slots: int) -> None:
        self.tokens, self.positions, self.chains, self.generations = np.full((4, slots), _UNWRITTEN, dtype=np.int64)

    def rows(self) -> tuple[Integers, ...]:
        """What belongs to the content, whichever page it is on."""
        return self.tokens, self.positions, self.chains

    def all_rows(self) -> tuple[Integers, ...]:
        """The same, and when it was written."""
        return *self.rows(), self.generations


class ShadowRunner:
    """A runner around another one. ``generations[group][page]`` counts how often the pool has taken a page back.

    Of every ``every_steps``-th step it checks each chunk, before and after the forward pass; with ``sample``, for
    service, one chunk in turn, and of long contexts ``SAMPLE_TOKENS`` in turn. ``guards`` see every batch before it
    runs. Raises ``ShadowError``; what the inner runner raises passes through.
    """

    def __init__(
        self,
        inner: Runner,
        layout: CacheLayout,
        *,
        generations: Sequence[array[int]],
        every_steps: int = 1,
        sample: bool = False,
    ) -> None:
        self._inner = inner
        self._layout = layout
        self._generations = [np.frombuffer(each, dtype=np.int64) for each in generations]
        self._every_steps = every_steps
        self._sample = sample
        self._steps = self._void_steps = 0
        self.checked_chunks = 0
        self.guards: list[Callable[[Batch], None]] = []
        #: Of the host's full pages, and how often each has been freed; where a part of a context is read there.
        self.below: tuple[Slots, Integers] | None = None
        self.slots = [
            Slots(pages * (1 if group.kind is GroupKind.STATE else layout.page_tokens))
            for group, pages in zip(layout.groups, layout.pages, strict=True)
        ]

    def run(self, batch: Batch) -> list[Sampled]:
        """Check what is read, run, note what was written, check again.

        Where drafts did not hold nothing counts as written.
        """
        checked = self._before(batch)
        return self._after(batch, checked, self._inner.run(batch))

    def launch(self, batch: Batch) -> StepLanding:
        """The same in two parts; the inner runner has to be one that launches.

        Of what the step before is still writing nothing is known yet: that is looked at when this one has landed.
        """
        checked = self._before(batch)
        try:
            landing = cast("LaunchingRunner", self._inner).launch(batch)
        except Exception as error:  # noqa: BLE001 - told when it lands, as what is launched behind it has failed, too
            landing = partial(_raise, error)
        return partial(self._land, batch, checked, landing, number=self._steps)

    def _land(self, batch: Batch, checked: tuple[Chunk, ...], landing: StepLanding, *, number: int) -> list[Sampled]:
        try:
            results = landing()
        except Exception:
            self._void_steps = self._steps
            raise
        # What was launched behind a failed step counts for nothing, and has read what that has not written.
        return results if number <= self._void_steps else self._after(batch, checked, results)

    def _before(self, batch: Batch) -> tuple[Chunk, ...]:
        self._steps += 1
        for guard in self.guards:
            guard(batch)
        checked = self._chosen(batch)
        for chunk in checked:
            self._check(chunk, chunk.request.tokens[: min(chunk.start, chunk.request.computed_tokens)])
        self._forget(batch.chunks)  # whatever a failing step writes there is nothing to rely on
        return checked

    def _after(self, batch: Batch, checked: tuple[Chunk, ...], results: list[Sampled]) -> list[Sampled]:
        sampled = iter(results)
        held = [next(sampled).tokens[:-1] if chunk.samples else () for chunk in batch.chunks]
        # A request that was aborted meanwhile has not been given the token that the chunk awaited.
        known = [len(chunk.request.tokens) >= chunk.start + chunk.count for chunk in batch.chunks]
        self._check_awaited(batch, results)
        chunks, held = list(compress(batch.chunks, known)), list(compress(held, known))
        self._write(chunks, held)
        for chunk, drafts in zip(chunks, held, strict=True):
            if chunk in checked:
                self._check(chunk, [*chunk.request.tokens[: chunk.start + chunk.count], *drafts])
        return results

    def _check_awaited(self, batch: Batch, results: Sequence[Sampled]) -> None:
        """What the device read for tokens that the host did not know is what the step before has chosen."""
        sampling = (chunk for chunk in batch.chunks if chunk.samples)
        for chunk, sampled in zip(sampling, results, strict=True):
            here = chunk.request.tokens[chunk.start : chunk.start + 1]
            if sampled.awaited is not None and here not in ([], [sampled.awaited]):
                raise ShadowError(
                    f"request {chunk.request.id!r} has run token {sampled.awaited} for {here[0]} "
                    f"at position {chunk.start}, which it awaited"
                )

    def received(self, namespace: str, tokens: Sequence[int], tables: Sequence[Sequence[int]]) -> None:
        """Book pages that another rank computed: ``tables`` as the cache has them for these tokens, whole pages."""
        names = chains(seed_of(namespace), tokens)
        page, count = self._layout.page_tokens, len(tokens)
        for group, slots, table in zip(self._layout.groups, self.slots, tables, strict=True):
            if group.kind is GroupKind.STATE:
                start, places = count - 1, np.array(table[:1], dtype=np.int64)
            else:
                start = page * list(table).count(NULL_PAGE)
                pages = np.array(table[start // page :], dtype=np.int64)
                places = (pages[:, None] * page + np.arange(page)).ravel()
            slots.tokens[places] = tokens[start:]
            slots.positions[places] = np.arange(start, count)
            slots.chains[places] = names[start:]
            slots.generations[places] = self._generation(group, places)

    def _chosen(self, batch: Batch) -> tuple[Chunk, ...]:
        if self._steps % self._every_steps:
            return ()
        turn = self._steps // self._every_steps % len(batch.chunks)
        chosen = (batch.chunks[turn],) if self._sample else batch.chunks
        self.checked_chunks += len(chosen)
        return chosen

    def _chains_before(self, chunks: Sequence[Chunk]) -> Integers:
        page, slots = self._layout.page_tokens, []
        for chunk in chunks:
            number, offset = divmod(chunk.start - 1, page)
            slots.append(chunk.tables[0][number] * page + offset if chunk.start else 0)
        before = self.slots[0].chains[np.array(slots, dtype=np.int64)]
        for row, chunk in enumerate(chunks):
            if chunk.start == 0:
                before[row] = seed_of(chunk.request.namespace)
            elif chunk.sunk is not None and chunk.sunk.first <= (chunk.start - 1) // page < chunk.sunk.end:
                before[row] = self._sunk(chunk.sunk, chunk.start - 1, chunk.start)[2][0]
        return before

    def _forget(self, chunks: Sequence[Chunk]) -> None:
        """What is about to be written counts for nothing until it is; and it has to be each position's own place."""
        counts = [chunk.count + chunk.room for chunk in chunks]
        for group, slots in zip(self._layout.groups, self.slots, strict=True):
            places, positions, lengths = self._written(chunks, group, counts)
            if group.kind is not GroupKind.STATE:
                before = slots.positions[places]
                wrong = (before != positions) & (before != _UNWRITTEN)
                if wrong.any():  # as it is on pages that have changed hands
                    wrong &= slots.generations[places] == self._generation(group, places)
                if wrong.any():
                    row = int(wrong.argmax())
                    chunk = chunks[int(np.searchsorted(np.cumsum(lengths), row, side="right"))]
                    raise ShadowError(
                        f"request {chunk.request.id!r} writes position {positions[row]} of group {group.index} "
                        f"over position {before[row]} on a page that has not changed hands"
                    )
            slots.positions[places] = _UNWRITTEN

    def _write(self, chunks: Sequence[Chunk], held: Sequence[tuple[int, ...]]) -> None:
        """Book the chunks' own positions, and behind them the drafts that ``held``."""
        if not chunks:  # all of them are of requests that were aborted meanwhile
            return
        tokens: list[int] = []
        counts, bases = [], []
        for chunk, drafts in zip(chunks, held, strict=True):
            own = (*chunk.request.tokens[chunk.start : chunk.start + chunk.count], *drafts)
            counts.append(len(own))
            bases.append(len(tokens) - chunk.start)
            tokens += own
        known, before = np.array(tokens, dtype=np.int64), self._chains_before(chunks)
        if len(known) == len(chunks):  # decodes: most steps
            names = before * _FACTOR + known
        else:
            ends = np.cumsum(counts)[:-1]
            names = np.concatenate([*map(chains, before.tolist(), np.split(known, ends))])
        for group, slots in zip(self._layout.groups, self.slots, strict=True):
            places, positions, lengths = self._written(chunks, group, counts)
            rows = positions + np.repeat(bases, lengths)
            slots.tokens[places], slots.chains[places] = known[rows], names[rows]
            slots.positions[places] = positions
            slots.generations[places] = self._generation(group, places)

    def _written(
        self, chunks: Sequence[Chunk], group: CacheGroup, counts: Sequence[int]
    ) -> tuple[Integers, Integers, list[int]]:
        """Where the first ``counts`` positions of the chunks go, and which those are; how many there are of each.

        Of a state group it is the one slot of the state after them.
        """
        if group.kind is GroupKind.STATE:
            places = [chunk.tables[group.index][1] for chunk in chunks]
            ends = [chunk.start + count - 1 for chunk, count in zip(chunks, counts, strict=True)]
            return np.array(places, dtype=np.int64), np.array(ends, dtype=np.int64), [1] * len(chunks)
        starts = [
            chunk.start if group.kind is GroupKind.WINDOW else max(chunk.start, chunk.rebuilt_until) for chunk in chunks
        ]
        ends = [chunk.start + count for chunk, count in zip(chunks, counts, strict=True)]
        lengths = [max(0, end - start) for start, end in zip(starts, ends, strict=True)]
        if all(length == 1 for length in lengths):  # decodes: most steps
            page = self._layout.page_tokens
            slots = [
                chunk.tables[group.index][start // page] * page + start % page
                for chunk, start in zip(chunks, starts, strict=True)
            ]
            return np.array(slots, dtype=np.int64), np.array(starts, dtype=np.int64), lengths
        parts = [
            self._places(chunk, group, start, start + length)
            for chunk, start, length in zip(chunks, starts, lengths, strict=True)
        ]
        positions = [np.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)]
        return np.concatenate(parts), np.concatenate(positions), lengths

    def _places(self, chunk: Chunk, group: CacheGroup, start: int, end: int) -> Integers:
        """Slots of the positions [start, end) in a paged group."""
        page = self._layout.page_tokens
        first = start // page
        table = np.array(chunk.tables[group.index][first : -(-end // page)], dtype=np.int64)
        positions = np.arange(start, end)
        return table[positions // page - first] * page + positions % page

    def _generation(self, group: CacheGroup, places: Integers) -> Integers:
        page_slots = 1 if group.kind is GroupKind.STATE else self._layout.page_tokens
        return self._generations[group.index][places // page_slots]

    def _check(self, chunk: Chunk, tokens: Sequence[int]) -> None:
        """All that the chunk's queries look back to is what the ``tokens`` up to there say."""
        end = len(tokens)
        if end == 0:
            return
        for group, slots in zip(self._layout.groups, self.slots, strict=True):
            match group.kind:
                case GroupKind.FULL | GroupKind.DRAFT:
                    start, stop = self._stretch(end)
                case GroupKind.WINDOW:
                    start, stop = max(chunk.window_start, chunk.start + 1 - (group.window_tokens or 0)), end
                case GroupKind.STATE:
                    start, stop = end - 1, end
            if start >= stop or (group.kind is GroupKind.STATE and end < chunk.start):
                continue
            if group.kind is GroupKind.STATE:
                places = np.array([chunk.tables[group.index][end > chunk.start]], dtype=np.int64)
            else:
                places = self._places(chunk, group, start, stop)
            found = [row[places] for row in slots.all_rows()]
            found.append(self._generation(group, places))
            if group.kind is GroupKind.FULL and chunk.sunk is not None:
                page = self._layout.page_tokens
                low, high = max(start, chunk.sunk.first * page), min(stop, chunk.sunk.end * page)
                for row, below in zip(found, self._sunk(chunk.sunk, low, max(low, high)), strict=True):
                    row[low - start : low - start + len(below)] = below
            said, positions, names, written, now = found
            known = np.array(tokens[start:stop], dtype=np.int64)
            wrong = {
                "position": positions != np.arange(start, stop),
                "token": said != known,
                "generation": written != now,
            }
            for what, where in wrong.items():
                self._compare(chunk, group, what, where, start)
            self._compare(chunk, group, "previous token", _broken(names, known[1:]), start + 1)

    def _sunk(self, sunk: Sunk, start: int, end: int) -> list[Integers]:
        """What the host holds of positions [start, end): as in ``Slots.all_rows``, and its pages' generations now."""
        if self.below is None:
            raise ShadowError("a part of a context is read on the host, and nobody watches what is written there")
        slots, generations = self.below
        page, positions = self._layout.page_tokens, np.arange(start, end)
        pages = np.array(sunk.slots, dtype=np.int64)[positions // page - sunk.first]
        places = pages * page + positions % page
        return [*(row[places] for row in slots.all_rows()), generations[pages]]

    def _stretch(self, end: int) -> tuple[int, int]:
        """The part of the positions up to ``end`` to look at: all of them, or in service another one each time."""
        if not self._sample or end <= SAMPLE_TOKENS:
            return 0, end
        low = self._steps // self._every_steps * SAMPLE_TOKENS % end
        return low, min(end, low + SAMPLE_TOKENS)

    def _compare(self, chunk: Chunk, group: CacheGroup, what: str, wrong: npt.NDArray[np.bool_], start: int) -> None:
        if wrong.any():
            position = start + int(wrong.argmax())
            raise ShadowError(
                f"request {chunk.request.id!r} reads a wrong {what} at position {position} of group {group.index}"
            )


def _raise(error: Exception) -> NoReturn:
    raise error


def _broken(chains: Integers, tokens: Integers) -> npt.NDArray[np.bool_]:
    """Where a slot's chain is not that of the slot before it and its own token."""
    return np.asarray(chains[:-1] * _FACTOR + tokens != chains[1:])
