"""The price of a rank for a request, in seconds.

    price = wait + work + decode + evict + move

- wait: prefill already queued there, and some for what was sent there in the last minutes, or in the last quarter of an
  hour where that was more, in proportion to the work that this request brings: a conversation that starts cold stays,
  and its turns will wait where ranks are busy;
- work: prefill of what the rank does not hold, and loading of what lies in a lower tier there;
- decode: how much the requests decoding there slow this one, and it them;
- evict: the recomputation this request's blocks will cause by pushing others out;
- move: what leaving home costs others: so many times what home saves and other ranks do not. A session is sticky
  while it is warm at home, and free once it is cold there, or has no more there than a head that all ranks hold. The
  factor has two parts. The turns that follow lose what this one loses, as many as are expected: for agents, which come
  back, ``move_weight``, for readers few. And computing again what home holds keeps everybody waiting where it is done,
  the longer the busier those ranks are: those who queue, by rho / (1 - rho) for a second of work, and where nobody's
  next turn depends on it all who come before the queue is empty again: for each who waits now rho / (1 - rho) more. rho
  and the queue are means of the other ranks, home left out: a queue at home makes nobody stay. Nor does a slow home:
  what it holds is computed again at the others' pace, where that is faster. What home would load counts once only.

Requests without a home, or with one that has nothing for them, cost others something too by where they go. It is part
of the move's term.

- A conversation that begins finds heads that others share. A copy made elsewhere would serve those who come after; so
  where it finds one, only a part is credited, or everybody who shares a head would go where its first copy is; and
  where more sessions are at home than elsewhere, nothing: their turns may cost little now, but they stay. The part
  holds as far as conversations come back: what comes once, under a name of its own, finds its own history.
- Where some layers have windows or states, a head that one prompt has left on a rank cannot be used there: of these
  layers it has kept what lies before its own end. Only the second to fork there leaves the head ready for the third. So
  as long as a head is stored but nowhere ready, who computes it where it is not stored lets those who follow, as many
  as the credit above expects, compute it once more. A subagent counts one, since its parent waits for it.
- A subagent's siblings begin at the same moment with the same head. What it computes counts half as much again, so that
  a small group waits for one prefill, and only a large one spreads. Where its parent is at home, what it pushes out is
  wanted back for certain: the parent has waited for longer than the others, and goes on when its children end.
- A session's first requests, at once and of different prompts, meet where the first of them is, but for as long only as
  half of their own work.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from router.core.load import (
    LASTING_HALF_LIFE_SECONDS,
    RECENT_HALF_LIFE_SECONDS,
    lasting_seconds,
    recent_seconds,
    wait_seconds,
)
from router.core.pace import prefill_seconds
from router.core.types import Price, RankView, RouteRequest

#: Decode steps over which a request and its neighbours slow each other: of a reply's some 300 those that others share.
#: With all of them the requests in flight elsewhere weigh more than a head that subagents share, and with 30 too little
#: to bring a rank into use again that was away.
_DECODE_STEPS = 60
#: Share of evicted tokens that somebody will want back, and the weight of that cost.
_EVICTED_RETURN_RATIO = 0.5
#: Seconds of waiting for a second of own work on a rank that was busy all the time: it spreads cold conversations,
#: and is too little to leave a cache for.
_BUSY_WEIGHT = 2.0
#: A token loaded from a lower tier, in tokens computed.
LOAD_RATIO = 0.2
#: Conversations that are expected to begin with a head after one that does, and subagents after a subagent.
_FOLLOWERS, _FOLLOWING_AGENTS = 3.0, 1.0
#: The part of a shared head that is credited to a conversation that begins, where no more sessions are at home than on
#: the mean of all ranks, what chance brings beside, and so many.
_SHARED_CREDIT_RATIO = 1.0 / (1.0 + _FOLLOWERS)
_CROWD = 1.0
#: What a prompt of many that begin together costs the others, for a second of its own work.
_SIBLING_WEIGHT = 0.5
#: From fading seconds of prefill to the share of time they took: over the integral of the fading.
_RECENT_SCALE = math.log(2.0) / RECENT_HALF_LIFE_SECONDS
_LASTING_SCALE = math.log(2.0) / LASTING_HALF_LIFE_SECONDS
#: Ranks are never taken to be busier than this, or nothing would ever move.
_LARGEST_BUSY_RATIO = 0.98


@dataclass(frozen=True, slots=True)
class CostParameters:
    """Constants of the price; ``move_weight`` is for conversations that are sure to come back."""

    move_weight: float = 16.0


def reusable_tokens(rank: RankView, request: RouteRequest) -> int:
    """The prefix the rank is believed to reuse, discounted by trust in its predictions."""
    return int(request.reusable_tokens.get(rank.slot, 0) * rank.trust.ratio)


def work_seconds(rank: RankView, request: RouteRequest, *, credit_ratio: float = 1.0) -> float:
    """Prefill of what the rank does not hold, and the loading of what lies in a lower tier there.

    Only ``credit_ratio`` of what it holds is taken to be there.
    """
    return _work_seconds(rank, request, reusable_tokens(rank, request), credit_ratio=credit_ratio)


def _work_seconds(rank: RankView, request: RouteRequest, held_tokens: int, *, credit_ratio: float = 1.0) -> float:
    """The same, where the rank's ``reusable_tokens`` are known."""
    prompt_tokens = request.prompt_tokens
    reusable = int(credit_ratio * held_tokens)
    computed = prefill_seconds(rank.pace, uncached_tokens=prompt_tokens - reusable, context_tokens=prompt_tokens)
    if not request.loadable_tokens:
        return computed
    loadable = int(credit_ratio * request.loadable_tokens.get(rank.slot, 0))
    if loadable <= reusable:
        return computed
    rest = prefill_seconds(rank.pace, uncached_tokens=prompt_tokens - loadable, context_tokens=prompt_tokens)
    return rest + LOAD_RATIO * (computed - rest)


def price(
    rank: RankView, request: RouteRequest, *, home: RankView | None, parameters: CostParameters, now: float
) -> Price:
    """Price one rank. ``home`` is the session's home if it can serve now."""
    (found,) = prices((rank,), request, home=home, parameters=parameters, now=now)
    return found


def prices(
    ranks: Sequence[RankView], request: RouteRequest, *, home: RankView | None, parameters: CostParameters, now: float
) -> list[Price]:
    """Price ranks, in their order.

    This loop is what a decision among many ranks costs, so what is called for each rank elsewhere is written out here,
    which takes less than half of the time.
    """
    if not ranks:
        return []
    prompt_tokens = request.prompt_tokens
    reusable = request.reusable_tokens
    held = [int(reusable.get(rank.slot, 0) * rank.trust.ratio) for rank in ranks]
    leave_seconds = 0.0
    if home is not None:
        others = [rank for rank in ranks if rank.slot != home.slot]
        mean_busy = sum([_busy_ratio(rank, now=now) for rank in others]) / max(1, len(others))
        queue_ratio = mean_busy / (1.0 - mean_busy)
        mean_waiting = sum([rank.load.waiting for rank in others]) / max(1, len(others))
        delay = queue_ratio * mean_waiting
        factor = delay + request.return_ratio * (parameters.move_weight + queue_ratio - delay)
        leave_seconds = _leave_seconds(home, request, held_by_all=min(held), factor=factor)
        others_factor = sum([rank.pace.factor for rank in others]) / max(1, len(others))
        leave_seconds *= min(1.0, others_factor / home.pace.factor)
        if request.is_beginning:
            leave_seconds = max(leave_seconds, _SIBLING_WEIGHT * work_seconds(home, request))
    credit_ratio, most_at_home, at_home = 1.0, math.inf, request.at_home
    sibling_weight, followers = 0.0, _FOLLOWERS
    unready_tokens, ready_tokens, stored = 0, 0, request.stored_tokens
    if request.home is None and request.session is not None:
        if request.session.agent:
            sibling_weight, followers = _SIBLING_WEIGHT, _FOLLOWING_AGENTS
        else:
            credit_ratio -= request.return_ratio * (1.0 - _SHARED_CREDIT_RATIO)
            mean_at_home = sum([at_home.get(rank.slot, 0) for rank in ranks]) / len(ranks)
            most_at_home = mean_at_home + math.sqrt(mean_at_home) + _CROWD
        if stored:
            ready_tokens, most_tokens = max(held), max([stored.get(rank.slot, 0) for rank in ranks])
            unready_tokens = most_tokens if most_tokens > ready_tokens else 0
    is_loadable, output_tokens = bool(request.loadable_tokens), request.output_tokens
    new = tuple.__new__  # a named tuple's own is a call into Python
    found: list[Price] = []
    for rank, held_tokens in zip(ranks, held, strict=True):
        slot, load, pace = rank.slot, rank.load, rank.pace
        factor = pace.factor
        uncached_tokens = prompt_tokens - held_tokens
        if is_loadable:
            own_seconds = _work_seconds(rank, request, held_tokens)
        else:  # ``prefill_seconds``, written out
            attention = uncached_tokens * (prompt_tokens - uncached_tokens / 2)
            own_seconds = factor * (pace.token_seconds * uncached_tokens + pace.attention_seconds * attention)
        brought_seconds = own_seconds
        if home is None:
            move_seconds = sibling_weight * own_seconds
            ratio = credit_ratio if at_home.get(slot, 0) <= most_at_home else 0.0
            if ratio < 1.0:
                move_seconds = _work_seconds(rank, request, held_tokens, credit_ratio=ratio) - own_seconds
            if unready_tokens:
                behind_tokens = unready_tokens - max(ready_tokens, stored.get(slot, 0))
                move_seconds += followers * prefill_seconds(
                    pace, uncached_tokens=behind_tokens, context_tokens=unready_tokens
                )
            brought_seconds += move_seconds
        else:
            move_seconds = 0.0 if slot == home.slot else leave_seconds
        queued_seconds = wait_seconds(load, pace, now=now) if load.waiting else 0.0
        busy_ratio = 0.0
        if load.recent_seconds:
            recently, for_long = recent_seconds(load, now=now), lasting_seconds(load, now=now)
            busy_ratio = factor * max(_RECENT_SCALE * recently, _LASTING_SCALE * for_long)
        step_seconds = pace.decode_request_seconds * load.inflight + pace.decode_token_seconds * load.inflight_tokens
        evict_seconds = 0.0
        if pool_tokens := rank.pool_tokens:
            added_tokens = uncached_tokens + output_tokens
            overflow_tokens = rank.resident_tokens() + added_tokens - pool_tokens
            if overflow_tokens > 0:
                pushed_tokens = min(added_tokens, overflow_tokens)
                evict_seconds = factor * pace.token_seconds * pushed_tokens
                if slot != request.parent_home:
                    evict_seconds *= _EVICTED_RETURN_RATIO
        found.append(
            new(
                Price,
                (
                    slot,
                    queued_seconds + _BUSY_WEIGHT * busy_ratio * brought_seconds,
                    own_seconds,
                    _DECODE_STEPS * factor * step_seconds,
                    evict_seconds,
                    move_seconds,
                    0.0,
                ),
            )
        )
    return found


def _busy_ratio(rank: RankView, *, now: float) -> float:
    """The share of its time for which what was sent lately keeps the rank busy."""
    if not rank.load.recent_seconds:
        return 0.0
    return min(_LARGEST_BUSY_RATIO, _RECENT_SCALE * rank.pace.factor * recent_seconds(rank.load, now=now))


def _leave_seconds(home: RankView, request: RouteRequest, *, held_by_all: int, factor: float) -> float:
    """What home saves of computing is lost to others ``factor`` times, but for the head that all ranks hold. What it
    saves by loading is lost no more than once: who has to load at home would load there again, and finds everything on
    the device where it moves to.
    """
    prompt_tokens = request.prompt_tokens
    without, computed = (
        prefill_seconds(home.pace, uncached_tokens=prompt_tokens - held, context_tokens=prompt_tokens)
        for held in (held_by_all, reusable_tokens(home, request))
    )
    loading_saves = computed - work_seconds(home, request) if request.loadable_tokens else 0.0
    return factor * max(0.0, without - computed) + min(1.0, factor) * loading_saves
