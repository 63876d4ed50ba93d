"""What the brain has to say of requests whose prompt and answer are computed on different ranks."""

from __future__ import annotations

from collections.abc import Mapping

from router.core.pd import HANDOVER_SECONDS, transfer_seconds
from router.core.types import Decision, FleetView, Handover, WorkerRole
from router.core.ways import lacking
from router.errors import NoWorker
from router.fleet.member import Member
from router.wire import handover
from router.wire.openai import InferenceRequest


def contracts(request: InferenceRequest) -> frozenset[Handover]:
    """By which contracts it can be split; none where nothing is generated."""
    suits = {
        Handover.BOOTSTRAP: handover.suits_bootstrap(request),
        Handover.PARAMS: handover.suits_params(request),
    }
    return frozenset(contract for contract, does in suits.items() if does)


def by_part(held: Mapping[int, int], view: FleetView) -> tuple[Mapping[int, int], Mapping[int, int]]:
    """What the ranks that answer hold of a prompt, and what those hold that compute prompts for others."""
    computing = {rank.slot for rank in view.ranks if rank.part.role is WorkerRole.PREFILL}
    return (
        {slot: tokens for slot, tokens in held.items() if slot not in computing},
        {slot: tokens for slot, tokens in held.items() if slot in computing},
    )


def no_worker(view: FleetView, model: str) -> NoWorker:
    """Why a model cannot be served now."""
    match lacking(view, model):
        case WorkerRole.DECODE:
            return NoWorker(f"{model!r} has prefill workers only: none can answer.", code="no_decode_worker")
        case WorkerRole.PREFILL:
            return NoWorker(f"{model!r} has no prefill worker for its decode workers.", code="no_prefill_worker")
        case _:
            return NoWorker(f"No worker is ready for {model!r} now.")


def learn_pace(member: Member, decision: Decision, *, prompt_tokens: int, served_seconds: float) -> None:
    """A first token came ``served_seconds`` after the rank began on it: of the prompt, or of what it was handed.

    SGLang's decode rank is asked when its partner is, so its time says nothing of the transfer; the partner answers
    once all is handed over, which is not computing.
    """
    contract = member.target.part.handover
    if decision.prefill is not None:
        if contract is Handover.PARAMS:
            member.learner.observe_transfer(seconds=served_seconds - HANDOVER_SECONDS, tokens=decision.transfer_tokens)
        return
    if decision.transfer_tokens and contract is Handover.BOOTSTRAP:
        served_seconds -= transfer_seconds(member.pace, tokens=decision.transfer_tokens)
    member.learner.observe(
        served_seconds=served_seconds,
        uncached_tokens=prompt_tokens - decision.expected_cached_tokens,
        context_tokens=prompt_tokens,
    )
