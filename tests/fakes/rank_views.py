"""Ranks as a policy sees them."""

from __future__ import annotations

from typing import Any

from router.core.load import LoadBook
from router.core.pace import prior
from router.core.types import RankId, RankStatus, RankView, Trust


def rank_view(slot: int, **fields: Any) -> RankView:
    """A ready rank that serves ``m``, idle unless ``load`` says otherwise."""
    plain: dict[str, Any] = {
        "id": RankId("w", slot),
        "models": frozenset({"m"}),
        "status": RankStatus.READY,
        "pace": prior(10_000.0),
        "trust": Trust(),
    }
    if "load" not in fields:
        plain["load"] = LoadBook().load(slot)
    return RankView(slot=slot, **plain | fields)
