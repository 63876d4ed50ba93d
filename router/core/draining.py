"""How a rank that is drained hands its sessions over: one after another, each with its next turn.

All at once they would have all their histories computed elsewhere in the same moments. So while one is on its way,
until its first token, the others are served where they are.
"""

from __future__ import annotations

import msgspec

from router.core.load import Claim
from router.core.types import FleetView, RankStatus, RouteRequest


class Departures:
    """Who is leaving which rank: the claim, at its new rank, of the last request that left."""

    def __init__(self) -> None:
        self._last: dict[int, Claim] = {}

    def leaving(self, request: RouteRequest, view: FleetView) -> RouteRequest | None:
        """The request without those of its homes that it is to leave now; None where there is nothing to leave."""
        homes, draining = {request.home, request.prefill_home}, RankStatus.DRAINING
        left = {
            rank.slot
            for rank in view.ranks
            if rank.status is draining and rank.slot in homes and self._may_leave(rank.slot)
        }
        if not left:
            return None
        return msgspec.structs.replace(
            request,
            home=None if request.home in left else request.home,
            prefill_home=None if request.prefill_home in left else request.prefill_home,
        )

    def left(self, before: RouteRequest, after: RouteRequest, claim: Claim) -> None:
        """The request, ``leaving`` as ``after``, was sent elsewhere."""
        for slot in {before.home, before.prefill_home} - {after.home, after.prefill_home}:
            if slot is not None:
                self._last[slot] = claim

    def _may_leave(self, slot: int) -> bool:
        last = self._last.get(slot)
        return last is None or not last.waiting
