"""Which ranks may serve a request, by what each would do of it: all, the prompt, or the answer."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence, Set
from dataclasses import dataclass, replace

import msgspec

from router.core.policy import candidates
from router.core.types import FleetView, RankStatus, RankView, RouteRequest, WorkerRole

_NONE = frozenset[int]()


def can_serve(ranks: Iterable[RankView]) -> bool:
    """Whether the ranks that are ready, whatever their model, can answer anything at all."""
    ready = [rank.part for rank in ranks if rank.status is RankStatus.READY]
    prefill = {part.handover for part in ready if part.role is WorkerRole.PREFILL}
    return any(
        part.role is not WorkerRole.PREFILL
        and (part.role is WorkerRole.UNIFIED or part.is_self_sufficient or part.handover in prefill)
        for part in ready
    )


def can_spare(view: FleetView, slots: Collection[int], leaving: Collection[int]) -> bool:
    """Whether the ranks that stay are ready to answer for every model of these ``slots``; ``leaving`` go as well."""
    models = {model for rank in view.ranks if rank.slot in slots for model in rank.models}
    staying = [rank for rank in view.ranks if rank.slot not in leaving]
    return all(can_serve(rank for rank in staying if model in rank.models) for model in models)


def lacking(view: FleetView, model: str) -> WorkerRole | None:
    """Which role's absence keeps a model that ready ranks serve from being answered; None: that is not why."""
    roles = {rank.part.role for rank in view.ranks if model in rank.models and rank.status is RankStatus.READY}
    if roles == {WorkerRole.PREFILL}:
        return WorkerRole.DECODE
    return WorkerRole.PREFILL if roles == {WorkerRole.DECODE} else None


def is_split(view: FleetView, request: RouteRequest) -> bool:
    """Whether roles matter to the request. It goes whole, to any rank, where it cannot be split or its model is not."""
    if not view.is_disaggregated or not request.handovers:
        return False
    return {rank.part.role for rank in view.ranks if request.model in rank.models} != {WorkerRole.UNIFIED}


def prompt_alone(request: RouteRequest) -> RouteRequest:
    """The request as a prefill rank sees it: no answer, and a home of its own."""
    home, parent_home = request.prefill_home, request.prefill_parent_home
    return msgspec.structs.replace(request, home=home, parent_home=parent_home, output_tokens=0)


def has_partner(view: FleetView, request: RouteRequest, rank: RankView) -> bool:
    """Whether a prefill rank is up that could hand the request to this decode rank, if it has room or not."""
    anywhere = msgspec.structs.replace(prompt_alone(request), allowed=None)
    return rank.part.handover in request.handovers and any(
        other.part.role is WorkerRole.PREFILL and other.part.handover is rank.part.handover
        for other in candidates(view, anywhere)
    )


@dataclass(frozen=True, slots=True)
class Ways:
    """The ranks that may serve a request, by what they would do of it. ``alone`` has decode ranks, too, where they can
    do without a prefill rank; ``decode`` those that have a prefill rank to be handed the prompt by.
    """

    alone: Sequence[RankView]
    prefill: Sequence[RankView] = ()
    decode: Sequence[RankView] = ()

    @classmethod
    def of(cls, view: FleetView, request: RouteRequest, *, closed: frozenset[int] = _NONE) -> Ways:
        """Draining ranks keep their own sessions here too: a prefill rank those whose prompts it computes. Ranks that
        are ``closed`` are left out, where there are others of their role.
        """
        answering = candidates(view, request)
        computing = candidates(view, prompt_alone(request))
        prefill = _sound((rank for rank in computing if rank.part.role is WorkerRole.PREFILL), closed)
        decode = _sound((rank for rank in answering if rank.part.role is WorkerRole.DECODE), closed)
        unified = _sound((rank for rank in answering if rank.part.role is WorkerRole.UNIFIED), closed)
        contracts = request.handovers & {rank.part.handover for rank in prefill}
        return cls(
            alone=[*unified, *(rank for rank in decode if rank.part.is_self_sufficient)],
            prefill=[rank for rank in prefill if rank.part.handover in request.handovers],
            decode=[rank for rank in decode if rank.part.handover in contracts],
        )

    @classmethod
    def open(cls, view: FleetView, request: RouteRequest, *, closed: frozenset[int] = _NONE) -> Ways:
        """The same of any request, whole ones included: any rank serves those alone."""
        if is_split(view, request):
            return cls.of(view, request, closed=closed)
        return cls(_sound(candidates(view, request), closed))

    @property
    def answering(self) -> Sequence[RankView]:
        """Those that may answer, each once."""
        if not self.decode:
            return self.alone
        alone = {rank.slot for rank in self.alone}
        return [*self.alone, *(rank for rank in self.decode if rank.slot not in alone)]

    @property
    def slots(self) -> frozenset[int]:
        """All of them."""
        return frozenset(rank.slot for ranks in (self.alone, self.prefill, self.decode) for rank in ranks)

    @property
    def beginning(self) -> Ways:
        """For a prompt of which nothing is cached: a decode rank that can be handed it does not compute it."""
        paired = {rank.slot for rank in self.decode}
        return replace(self, alone=[rank for rank in self.alone if rank.slot not in paired]) if paired else self

    def complete(self, slots: Set[int]) -> frozenset[int]:
        """Of these slots those by which the request can be served: alone, or with a partner among them."""
        found = {rank.slot for rank in self.alone if rank.slot in slots}
        for handover in {rank.part.handover for rank in self.prefill}:
            halves = [
                [rank.slot for rank in ranks if rank.slot in slots and rank.part.handover is handover]
                for ranks in (self.prefill, self.decode)
            ]
            if all(halves):
                found.update(*halves)
        return frozenset(found)


def _sound(ranks: Iterable[RankView], closed: frozenset[int]) -> Sequence[RankView]:
    """Without those that keep failing, where there are others."""
    ranks = list(ranks)
    return [rank for rank in ranks if rank.slot not in closed] or ranks if closed else ranks
