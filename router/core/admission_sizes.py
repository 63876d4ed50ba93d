"""How much of a rank's pool a request takes, as admission counts it.

One rule for what is checked and for what is charged, whichever ranks happen to be open to an attempt.
"""

from __future__ import annotations

from collections.abc import Mapping

from router.core.admission_charges import Charge
from router.core.types import FleetView, RankStatus, RouteRequest, WorkerRole

_SERVING = (RankStatus.READY, RankStatus.DRAINING)


def shared_tokens(request: RouteRequest, view: FleetView) -> Mapping[WorkerRole, int]:
    """For a rank of each role the head that all who serve the model and do the same hold, answering or computing
    prompts alone: it is stored once on each, and charged to nobody. What is known to be of no other conversation is
    charged to its own, wherever it has been served.
    """
    held: dict[bool, list[int]] = {False: [], True: []}
    for rank in view.ranks if request.reusable_tokens else ():
        if request.model in rank.models and rank.status in _SERVING:
            held[rank.part.role is WorkerRole.PREFILL].append(request.reusable_tokens.get(rank.slot, 0))
    most = request.prompt_tokens if request.common_tokens is None else request.common_tokens
    answering, computing = (min(most, *tokens) if len(tokens) > 1 else 0 for tokens in held.values())
    return {WorkerRole.UNIFIED: answering, WorkerRole.DECODE: answering, WorkerRole.PREFILL: computing}


def footprint(request: RouteRequest, *, shared_tokens: int) -> int:
    """Tokens that the request occupies by itself."""
    return max(0, request.prompt_tokens - shared_tokens) + request.output_tokens


def found_tokens(request: RouteRequest, slot: int, *, shared_tokens: int) -> int:
    """Tokens of its own that are there already: while its conversation has as many in flight there, they are those."""
    return max(0, request.reusable_tokens.get(slot, 0) - shared_tokens)


def added_footprint(request: RouteRequest, slot: int, charge: Charge | None, *, shared_tokens: int) -> int:
    """Tokens that it brings to what its conversation has in flight there, of which it may find a part."""
    tokens = footprint(request, shared_tokens=shared_tokens)
    if charge is None:
        return tokens
    return tokens - min(found_tokens(request, slot, shared_tokens=shared_tokens), charge.inflight_tokens)
