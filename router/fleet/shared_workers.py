"""The workers that all replicas have in common, as a register in which the last deed of an operator stands.

A deed is a registration, a removal or a (un)drain at any replica. Workers of the configuration count as registered at
the beginning of time, so that a replica that restarts takes nobody's later deed back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, ValidationError

from router.errors import Conflict
from router.fleet.registry import Registry
from router.settings import WorkerSpec
from router.wire.redis import WorkerEntry

#: Stamp of what the configuration says: before any deed.
CONFIGURED_MS = 1
#: Removals that are remembered at most, the latest.
_MAX_REMOVALS = 1000


class WorkerRecord(BaseModel):
    """A registered worker as replicas tell each other of it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    spec: WorkerSpec
    is_draining: bool = False


@dataclass(frozen=True, slots=True)
class Deed:
    """The last that was done with a worker; ``record`` None: removed. ``stamp_ms`` is None until Redis stamps it."""

    record: WorkerRecord | None
    stamp_ms: int | None
    done_at: float


class WorkerBook:
    """One replica's copy of the register."""

    def __init__(self) -> None:
        self._deeds: dict[str, Deed] = {}
        self._refused: set[str] = set()
        self._unreadable: set[str] = set()

    def configured(self, records: Iterable[WorkerRecord], *, now: float) -> None:
        """The workers that the replica starts with."""
        self._deeds = {record.spec.name: Deed(record, CONFIGURED_MS, now) for record in records}

    def observe(self, records: Mapping[str, WorkerRecord], *, now: float) -> bool:
        """Notice what was done at this replica since the last look. True if anything was."""
        changed = False
        for name, record in records.items():
            known = self._deeds.get(name)
            if known is None or known.record != record:
                self._deeds[name] = Deed(record, None, now)
                changed = True
        for name, known in self._deeds.items():
            if known.record is not None and name not in records and name not in self._refused:
                self._deeds[name] = Deed(None, None, now)
                changed = True
        return changed

    def deeds(self) -> dict[str, Deed]:
        """All that is known, for ``entries`` and then ``merge``."""
        return dict(self._deeds)

    def refuse(self, name: str) -> None:
        """This replica cannot have that worker: that it lacks it is no removal."""
        self._refused.add(name)

    @staticmethod
    def entries(deeds: Mapping[str, Deed], *, now: float) -> dict[str, WorkerEntry]:
        """What is told to the store."""
        return {
            name: WorkerEntry(
                deed.record.model_dump_json(exclude_defaults=True) if deed.record else "",
                deed.stamp_ms,
                now - deed.done_at,
            )
            for name, deed in deeds.items()
        }

    def merge(
        self, told: Mapping[str, Deed], reply: Mapping[str, WorkerEntry | None], *, now: float
    ) -> tuple[dict[str, WorkerRecord | None], list[str]]:
        """Take over what the store answered to ``told``.

        Returns what must be done here before ``observe`` looks again (records, None to remove), and the names of
        workers whose records cannot be read and could the last time, or were not there.
        """
        changes: dict[str, WorkerRecord | None] = {}
        bad: list[str] = []
        for name, entry in reply.items():
            if entry is None:
                bad.append(name)
                continue
            mine = self._deeds.get(name)
            if mine is not told.get(name):
                continue  # something was done here meanwhile; it is told next time
            if mine is not None and mine.stamp_ms is not None and (entry.stamp_ms or 0) <= mine.stamp_ms:
                continue
            try:
                record = WorkerRecord.model_validate_json(entry.record) if entry.record else None
            except ValidationError:
                bad.append(name)
                continue
            self._deeds[name] = Deed(record, entry.stamp_ms, now)
            self._refused.discard(name)
            if record != (mine.record if mine is not None else None):
                changes[name] = record
        self._forget_removals()
        fresh = [name for name in bad if name not in self._unreadable]
        self._unreadable = set(bad)
        return changes, fresh

    def _forget_removals(self) -> None:
        removals = [name for name, deed in self._deeds.items() if deed.record is None]
        removals.sort(key=lambda name: self._deeds[name].done_at)
        for name in removals[: max(0, len(removals) - _MAX_REMOVALS)]:
            del self._deeds[name]


# --- a replica's own registry -----------------------------------------------------------------------


def records(registry: Registry) -> dict[str, WorkerRecord]:
    """What the registry holds now."""
    return {
        worker.name: WorkerRecord(spec=worker.spec, is_draining=worker.is_draining) for worker in registry.workers()
    }


async def carry_out(registry: Registry, changes: Mapping[str, WorkerRecord | None]) -> dict[str, Conflict]:
    """Do here what was done at another replica. Returns the workers that this registry cannot have, with the reason."""
    specs = {worker.name: worker.spec for worker in registry.workers()}
    wanted = {name: record.spec for name, record in changes.items() if record is not None}
    leaving = [name for name in changes if name in specs and specs[name] != wanted.get(name)]
    joining = [spec for name, spec in wanted.items() if specs.get(name) != spec]
    refused = await registry.change(leaving=leaving, joining=joining) if leaving or joining else {}
    for name, record in changes.items():
        if record is not None and name not in refused:
            (registry.drain if record.is_draining else registry.undrain)(name)
    return refused
