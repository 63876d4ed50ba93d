"""``/admin/explain``: why a request went where it went, or where one would go now, as plain JSON values."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Protocol

import xxhash
from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field, model_validator
from structlog.typing import FilteringBoundLogger

from router.admin.reference import errors
from router.errors import NotFound
from router.fleet.decisions import Attempted, Decided, DecisionLog, Weighed
from router.wire.openai import Endpoint, InferenceRequest, parse_request

Json = dict[str, Any]


class Explainer(Protocol):
    """What explaining needs of the brain."""

    decisions: DecisionLog

    async def preview(self, request: InferenceRequest, headers: Mapping[str, str], *, tenant: str) -> Decided:
        """Decide about a request without sending it. Raises ``RequestError``."""


class Question(BaseModel):
    """A request as a client would send it."""

    model_config = ConfigDict(extra="forbid")

    body: Json = Field(description="The request's JSON body.")
    headers: dict[str, str] = Field(default_factory=dict, description="Headers that name the session.")
    endpoint: Endpoint = Field(default=Endpoint.CHAT, description="Which API the body is of.")
    tenant: str = "default"

    @model_validator(mode="before")
    @classmethod
    def _wraps_the_body(cls, value: object) -> object:
        if isinstance(value, dict) and "body" not in value and "model" in value:
            raise ValueError('the request belongs under "body": {"body": {"model": ...}, "headers": {...}}')
        return value


def explain_routes(explainer: Explainer) -> APIRouter:
    """The paths, for the admin app."""
    router = APIRouter()

    @router.get(
        "/admin/explain",
        summary="Why a request went where it went; its id is the answer's x-request-id.",
        responses=errors(400, 404),
    )
    async def explain(request_id: str) -> Json:
        decided = explainer.decisions.find(request_id)
        if decided is None:
            raise NotFound(
                f"No request {request_id!r} is remembered: the last {len(explainer.decisions)} are.",
                code="unknown_request_id",
                param="request_id",
            )
        return decided_view(decided)

    @router.post(
        "/admin/explain",
        summary="Where a request would go now, or that it would be held. Nothing is sent.",
        responses=errors(400, 404, 503),
    )
    async def explain_body(question: Question) -> Json:
        request = parse_request(question.endpoint, json.dumps(question.body).encode())
        headers = {name.lower(): value for name, value in question.headers.items()}
        return decided_view(await explainer.preview(request, headers, tenant=question.tenant))

    @router.get("/admin/decisions", summary="The last decisions, the latest first.", responses=errors(400))
    async def recent(limit: Annotated[int, Query(ge=1, le=1000)] = 20) -> Json:
        return {"decisions": [brief_view(decided) for decided in explainer.decisions.recent(limit)]}

    return router


def sampled_log(log: FilteringBoundLogger, *, ratio: float) -> Callable[[Decided, Attempted], None] | None:
    """Writes a line for each attempt of so many requests. A request's id decides, so that all its attempts are in."""
    if not ratio:
        return None

    def write(decided: Decided, attempted: Attempted) -> None:
        draw = xxhash.xxh3_64_intdigest(decided.request_id.encode("utf-8", "surrogatepass")) / 2**64
        if draw < ratio:
            price = next((weighed.price for weighed in attempted.ranks() if weighed.id == attempted.id), None)
            terms = {} if price is None else {"price_seconds": round(price.total_seconds, 6)}
            log.info("decision", **_request_view(decided), **attempt_view(attempted), **terms)

    return write


def decided_view(decided: Decided) -> Json:
    """A request with all its attempts and every rank's price, the cheapest first, and how it was held."""
    return {
        **_request_view(decided),
        **_held_view(decided),
        "attempts": [
            attempt_view(attempted)
            | {"ranks": sorted(map(_rank_view, attempted.ranks()), key=lambda rank: _cheapest_first(rank, attempted))}
            for attempted in decided.attempts
        ],
    }


def brief_view(decided: Decided) -> Json:
    """A request and its last attempt, without the prices."""
    last = attempt_view(decided.attempts[-1]) if decided.attempts else {}
    return _request_view(decided) | _held_view(decided) | {"attempts": len(decided.attempts)} | last


def attempt_view(attempted: Attempted) -> Json:
    """Where an attempt went, what was expected, and what came of it once it is over."""
    return {
        "rank": str(attempted.id),
        "prefill_rank": str(attempted.prefill_id) if attempted.prefill_id is not None else None,
        "reason": attempted.reason,
        "expected_cached_tokens": attempted.expected_cached_tokens,
        "best_cached_tokens": attempted.best_cached_tokens,
        "expected_prefill_seconds": round(attempted.expected_prefill_seconds, 6),
        "pair_seconds": _rounded(attempted.pair_seconds),
        "alone_seconds": _rounded(attempted.alone_seconds),
        "outcome": attempted.outcome,
        "actual_cached_tokens": attempted.cached_tokens,
        "first_token_seconds": _rounded(attempted.first_token_seconds),
        "seconds": _rounded(attempted.seconds),
    }


def _request_view(decided: Decided) -> Json:
    return {
        "request_id": decided.request_id or None,
        "model": decided.model,
        "tenant": decided.tenant,
        "session_hash": decided.session,
        "home": str(decided.home) if decided.home is not None else None,
        "keyed": decided.keyed,
        "prompt_tokens": decided.prompt_tokens,
        "ideal_cached_tokens": decided.ideal_tokens,
    }


def _held_view(decided: Decided) -> Json:
    """Why it was held, its place while it waits, 1 for the oldest, and then how that ended. None if it never was."""
    if (waiting := decided.waiting) is None:
        return {"held": None}
    ended = {"end": waiting.end, "seconds": _rounded(waiting.seconds)}
    return {"held": {"why": waiting.why, "position": waiting.position(), **ended}}


def _rank_view(weighed: Weighed) -> Json:
    view: Json = {
        "rank": str(weighed.id),
        "reusable_tokens": weighed.reusable_tokens,
        "trust_ratio": round(weighed.trust_ratio, 3),
        "is_failing": weighed.is_failing,
    }
    if weighed.price is None:
        return view | {"price_seconds": None}
    terms = weighed.price._asdict()
    del terms["slot"]
    terms["total_seconds"] = weighed.price.total_seconds
    return view | {"price_seconds": {name.removesuffix("_seconds"): round(term, 6) for name, term in terms.items()}}


def _cheapest_first(rank: Json, attempted: Attempted) -> tuple[bool, float]:
    price = rank["price_seconds"]
    return rank["rank"] != str(attempted.id), price["total"] if price else float("inf")


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)
