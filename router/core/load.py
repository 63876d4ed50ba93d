"""What the router has sent to each rank and not seen finished.

A request waits for its prefill until its first byte, then decodes until it ends. All changes go through a
``Claim`` whose end is idempotent, so no count can leak or go below zero.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from router.core.types import RankLoad, RankPace

#: Half-lives of the memory of prefill work sent. By the shorter one a fleet is known to be busy: backlogs come within
#: minutes. By both cold conversations are spread: they stay, and keep their ranks busy every minute or so, or after a
#: pause of several.
RECENT_HALF_LIFE_SECONDS = 180.0
LASTING_HALF_LIFE_SECONDS = 900.0
#: A worker with a prompt in hand may be silent for so long, whatever is expected of it.
_SILENT_SECONDS = 10.0


class Claim:
    """One request's share of a rank's load. It keeps the cells it was opened on, so that the end of a claim on a rank
    that has left cannot touch the rank that got its slot.

    ``heard_by``: of an answer that comes whole, by when its prompt should be computed, which nobody hears.
    """

    __slots__ = (
        "heard_by",
        "joint",
        "load",
        "open",
        "opened_at",
        "prefill_seconds",
        "prefill_tokens",
        "prompt_tokens",
        "queue",
        "waiting",
    )

    def __init__(
        self,
        load: RankLoad,
        queue: OrderedDict[Claim, None],
        joint: JointLoad | None,
        *,
        prompt_tokens: int,
        prefill_tokens: int,
        prefill_seconds: float,
        opened_at: float,
        heard_by: float | None,
    ) -> None:
        self.load = load
        self.queue = queue
        self.joint = joint
        self.prompt_tokens = prompt_tokens
        self.prefill_tokens = prefill_tokens
        self.prefill_seconds = prefill_seconds
        self.opened_at = opened_at
        self.heard_by = heard_by
        self.waiting = True
        self.open = True


@dataclass(slots=True)
class JointLoad:
    """A rank's load where other routers send to it too: ``total`` is ``own`` and ``elsewhere`` as one queue."""

    own: RankLoad
    elsewhere: RankLoad
    total: RankLoad

    def add_up(self, *, now: float) -> None:
        """Bring ``total`` up to date."""
        add_loads(self.total, (self.own, self.elsewhere), now=now)


class LoadBook:
    """Claims per slot. Only this class writes the cells it hands out.

    ``load(slot)`` is the router's own work. ``total(slot)`` is what views hold: the same cell, unless the ranks are
    shared with other routers, whose work ``set_elsewhere`` adds.
    """

    def __init__(self, *, is_shared: bool = False) -> None:
        self._is_shared = is_shared
        self._loads: dict[int, RankLoad] = {}
        self._joint: dict[int, JointLoad] = {}
        self._queues: dict[int, OrderedDict[Claim, None]] = {}

    def load(self, slot: int) -> RankLoad:
        """The slot's cell, made on first use."""
        load = self._loads.get(slot)
        if load is None:
            load = self._loads[slot] = RankLoad()
        return load

    def total(self, slot: int) -> RankLoad:
        """The cell of all routers' work, made on first use."""
        if not self._is_shared:
            return self.load(slot)
        if slot not in self._joint:
            self._joint[slot] = JointLoad(self.load(slot), RankLoad(), RankLoad())
        return self._joint[slot].total

    def set_elsewhere(self, slot: int, load: RankLoad, *, now: float) -> None:
        """What other routers have on the rank. Only for a book that ``is_shared``."""
        self.total(slot)
        self._joint[slot].elsewhere = load
        self._joint[slot].add_up(now=now)

    def forget(self, slot: int) -> None:
        """The rank is gone. Claims still open on it end without effect on its successor."""
        self._loads.pop(slot, None)
        self._joint.pop(slot, None)
        self._queues.pop(slot, None)

    def open(
        self,
        slot: int,
        *,
        prompt_tokens: int,
        prefill_tokens: int,
        seconds: float,
        now: float,
        heard_by: float | None = None,
    ) -> Claim:
        """A request is sent: ``seconds`` of prefill for ``prefill_tokens`` uncached tokens are expected, by the speed
        that the rank was first taken to have. ``heard_by`` as in ``Claim``.
        """
        load, queue = self.load(slot), self._queues.get(slot)
        if queue is None:
            queue = self._queues[slot] = OrderedDict()
        claim = Claim(
            load,
            queue,
            self._joint.get(slot),
            prompt_tokens=prompt_tokens,
            prefill_tokens=prefill_tokens,
            prefill_seconds=seconds,
            opened_at=now,
            heard_by=heard_by,
        )
        if not load.waiting:
            load.serving_since, load.serving_seconds = now, seconds
        load.inflight += 1
        load.inflight_tokens += prompt_tokens
        load.waiting += 1
        load.waiting_tokens += prefill_tokens
        load.waiting_seconds += seconds
        load.recent_seconds = recent_seconds(load, now=now) + seconds
        load.lasting_seconds = lasting_seconds(load, now=now) + seconds
        load.recent_at = now
        queue[claim] = None
        if claim.joint is not None:
            claim.joint.add_up(now=now)
        return claim

    def first_byte(self, claim: Claim, *, now: float) -> float | None:
        """Prefill is over. Returns the seconds of service it took alone on the rank, None if not known; of an answer
        that comes whole all since it was sent, which is more.

        The rank works on waiting prompts one after another, so service began when the one before ended.
        """
        if not claim.waiting:
            return None
        load = claim.load
        served: float | None = None
        if claim.heard_by is not None:
            served = now - claim.opened_at
            self._leave_unheard(claim, claim.heard_by, now=now)
        else:
            since = load.serving_since if claim.joint is None else claim.joint.total.serving_since
            if _is_next(claim):
                served = now - max(claim.opened_at, since)
            self._leave_queue(claim)
            load.serving_since = now
        if claim.joint is not None:
            claim.joint.add_up(now=now)
        return served

    def close(self, claim: Claim, *, now: float, is_computed: bool = True) -> None:
        """The request is over, however it ended. Calls after the first do nothing. Unless something of it
        ``is_computed``, it was no work.
        """
        if not claim.open:
            return
        claim.open = False
        load = claim.load
        if not is_computed:
            _take_back(load, claim.prefill_seconds, seconds_ago=now - claim.opened_at, now=now)
        if claim.waiting and claim.heard_by is not None:
            self._leave_unheard(claim, claim.heard_by, now=now)
        elif claim.waiting:
            if _first(claim):  # one that leaves from the middle of the queue has not been served
                load.serving_since = now
            self._leave_queue(claim)
        load.inflight -= 1
        load.inflight_tokens -= claim.prompt_tokens
        if claim.joint is not None:
            claim.joint.add_up(now=now)

    def _leave_unheard(self, claim: Claim, heard_by: float, *, now: float) -> None:
        """An answer that comes whole is over. Its prompt was computed before: who comes next has been served since that
        should have been, or since it was sent.
        """
        load, was_first = claim.load, _first(claim)
        self._leave_queue(claim)
        if was_first and claim.queue:
            following = next(iter(claim.queue))
            load.serving_since = max(load.serving_since, following.opened_at, min(now, heard_by))

    @staticmethod
    def _leave_queue(claim: Claim) -> None:
        load = claim.load
        claim.waiting = False
        del claim.queue[claim]
        load.waiting -= 1
        load.waiting_tokens -= claim.prefill_tokens
        load.waiting_seconds = load.waiting_seconds - claim.prefill_seconds if load.waiting else 0.0
        load.serving_seconds = next(iter(claim.queue)).prefill_seconds if load.waiting else 0.0


def _first(claim: Claim) -> bool:
    """Whether it is at the head of its rank's queue."""
    return next(iter(claim.queue)) is claim


def _is_next(claim: Claim) -> bool:
    """Whether the rank has been working on this very prompt since it was its turn: those before it in the queue were
    computed before it was sent, as far as anybody hears, and only their answers are still in the making.
    """
    for other in claim.queue:
        if other is claim:
            return True
        if other.heard_by is None or other.heard_by > claim.opened_at:
            return False
    return False


def _take_back(load: RankLoad, seconds: float, *, seconds_ago: float, now: float) -> None:
    """Count as not sent what was sent so long ago."""
    recently = seconds * math.exp2(-seconds_ago / RECENT_HALF_LIFE_SECONDS)
    lasting = seconds * math.exp2(-seconds_ago / LASTING_HALF_LIFE_SECONDS)
    load.recent_seconds = max(0.0, recent_seconds(load, now=now) - recently)
    load.lasting_seconds = max(0.0, lasting_seconds(load, now=now) - lasting)
    load.recent_at = now


def add_loads(total: RankLoad, parts: Iterable[RankLoad], *, now: float) -> None:
    """Make ``total`` several routers' work on one rank, as one queue: the prompt it works on is the one begun last."""
    total.inflight = total.inflight_tokens = total.waiting = total.waiting_tokens = 0
    total.waiting_seconds = total.serving_since = total.serving_seconds = 0.0
    total.recent_seconds = total.lasting_seconds = 0.0
    total.charged_tokens = 0
    total.recent_at = now
    begun_last = -math.inf
    for part in parts:
        total.inflight += part.inflight
        total.inflight_tokens += part.inflight_tokens
        total.waiting += part.waiting
        total.waiting_tokens += part.waiting_tokens
        total.waiting_seconds += part.waiting_seconds
        total.serving_since = max(total.serving_since, part.serving_since)
        if part.waiting and part.serving_since > begun_last:
            begun_last, total.serving_seconds = part.serving_since, part.serving_seconds
        total.recent_seconds += recent_seconds(part, now=now)
        total.lasting_seconds += lasting_seconds(part, now=now)
        total.charged_tokens += part.charged_tokens


def explains_silence(load: RankLoad, pace: RankPace, *, now: float) -> bool:
    """Whether a worker that answers no probe may just be at work: it streams, or is not yet long overdue with a prompt.

    What a prompt takes is an estimate, so it may take twice as long, and a little more.
    """
    if load.inflight > load.waiting:
        return True
    expected_seconds = pace.factor * load.waiting_seconds
    return load.waiting > 0 and now - load.serving_since <= 2.0 * expected_seconds + _SILENT_SECONDS


def wait_seconds(load: RankLoad, pace: RankPace, *, now: float) -> float:
    """Prefill still to be done before a new request's turn: what was promised, less what of the prompt in hand has
    been served. However late that one is, those behind it have not begun: a rank that hangs is not a rank that is done.
    """
    if not load.waiting:
        return 0.0
    served_seconds = min(pace.factor * load.serving_seconds, now - load.serving_since)
    return max(0.0, pace.factor * load.waiting_seconds - served_seconds)


def recent_seconds(load: RankLoad, *, now: float) -> float:
    """Prefill seconds sent lately, fading with a half-life, by the speed that the rank was first taken to have."""
    if not load.recent_seconds:
        return 0.0
    return load.recent_seconds * math.exp2(-(now - load.recent_at) / RECENT_HALF_LIFE_SECONDS)


def lasting_seconds(load: RankLoad, *, now: float) -> float:
    """The same with the longer memory."""
    if not load.lasting_seconds:
        return 0.0
    return load.lasting_seconds * math.exp2(-(now - load.recent_at) / LASTING_HALF_LIFE_SECONDS)
