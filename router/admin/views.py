"""What the admin plane shows: workers, ranks and the state of the fleet as plain JSON values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from router.fleet.decisions import session_hash
from router.fleet.fleet import Fleet
from router.fleet.member import RankInfo
from router.fleet.registry import Registry
from router.fleet.worker import Worker
from router.telemetry.metrics import Metrics
from router.telemetry.tallies import Counter

Json = dict[str, Any]


def worker_view(worker: Worker, ranks: Mapping[int, RankInfo]) -> Json:
    """One worker with its ranks."""
    info = worker.info
    view: Json = {
        "id": worker.name,
        "url": worker.spec.url,
        "status": worker.status,
        "reason": _reason(worker),
        "draining": worker.is_draining,
        "leaves_after": None if worker.awaits is None else sorted(worker.awaits),
    }
    if info is not None:
        view |= {
            "engine": info.engine,
            "models": list(info.models),
            "max_context_tokens": info.max_context_tokens,
            "dp_size": info.dp_size,
            "block_tokens": info.block_tokens,
            "pool_tokens": info.pool_tokens,
            "events": [source.endpoint if source else None for source in info.sources],
            "parity": [
                {"rank": rank, "standing": found.standing, "sentence": found.sentence or None}
                for rank, found in sorted(worker.parity.items())
            ],
        }
    view["ranks"] = [rank_view(ranks[slot]) for slot in worker.slots if slot in ranks]
    return view


def _reason(worker: Worker) -> str | None:
    """Why it is not ready, or not on the list."""
    if worker.reason or worker.awaits is None:
        return worker.reason or None
    return f"is off the list and serves until {', '.join(sorted(worker.awaits))} can"


def rank_view(rank: RankInfo) -> Json:
    """One rank: what it is given and what it holds."""
    used_tokens = rank.resident_blocks * (rank.block_tokens or 0)
    return {
        "rank": str(rank.id),
        "slot": rank.slot,
        "role": rank.role,
        "status": rank.status,
        "models": list(rank.models),
        "inflight_requests": rank.inflight,
        "waiting_tokens": rank.waiting_tokens,
        "prefill_tokens_per_second": round(rank.prefill_tokens_per_second),
        "trust_ratio": round(rank.trust_ratio, 3),
        "breaker": rank.breaker,
        "resident_blocks": rank.resident_blocks,
        "resident_tokens": used_tokens,
        "pool_tokens": rank.pool_tokens,
        "block_tokens": rank.block_tokens,
    }


def workers_view(registry: Registry, fleet: Fleet) -> list[Json]:
    """All workers, those that a reload took off the list last; these leave after the ones that they name, or before."""
    ranks = {rank.slot: rank for rank in fleet.ranks()}
    return [worker_view(worker, ranks) for worker in (*registry.workers(), *registry.outgoing())]


def fleet_view(registry: Registry, fleet: Fleet, metrics: Metrics, *, policy: str) -> Json:
    """Everything the console page draws, in one answer. Counts are since the router's start."""
    by_rank = {
        "prompt_tokens": _sums(metrics.prompt_tokens, "worker", "rank"),
        "cached_tokens": _sums(metrics.cached_tokens, "worker", "rank"),
        "predicted_tokens": _sums(metrics.predicted_tokens, "worker", "rank"),
        "ideal_tokens": _sums(metrics.ideal_tokens, "worker", "rank"),
        "best_tokens": _sums(metrics.best_tokens, "worker", "rank"),
    }
    ranks: list[Json] = []
    for rank in fleet.ranks():
        key = (rank.id.worker, str(rank.id.rank))
        ranks.append(rank_view(rank) | {name: sums.get(key, 0.0) for name, sums in by_rank.items()})
    return {
        "policy": policy,
        "workers": [
            {"id": worker.name, "url": worker.spec.url, "status": worker.status, "reason": _reason(worker)}
            for worker in (*registry.workers(), *registry.outgoing())
        ],
        "ranks": ranks,
        "sessions": len(fleet.sessions),
        "totals": {name: sum(sums.values()) for name, sums in by_rank.items()},
        "reasons": _by_one(metrics.decisions, "reason"),
        "statuses": _by_one(metrics.requests, "status"),
        "resyncs": _by_one(metrics.resyncs, "cause"),
    }


def sessions_view(fleet: Fleet, *, limit: int) -> list[Json]:
    """Sessions with a home, the most recently used first, named as in the decision log: what clients call them may be a
    secret.
    """
    return [
        {
            "model": model,
            "tenant": key.tenant,
            "session_hash": session_hash(key),
            "is_subagent": bool(key.agent),
            "home": str(home),
            "idle_seconds": round(idle_seconds, 1),
        }
        for model, key, home, idle_seconds in fleet.session_list(limit)
    ]


def _sums(counter: Counter, *labels: str) -> dict[tuple[str, ...], float]:
    """A counter's values added up by some of its labels."""
    sums: dict[tuple[str, ...], float] = {}
    for family in counter.collect():
        for sample in family.samples:
            if sample.name.endswith("_total"):
                key = tuple(sample.labels[label] for label in labels)
                sums[key] = sums.get(key, 0.0) + sample.value
    return sums


def _by_one(counter: Counter, label: str) -> dict[str, float]:
    return {key[0]: value for key, value in sorted(_sums(counter, label).items())}
