"""What may change while the router runs. Pure: two settings in, what to do out."""

from __future__ import annotations

from dataclasses import dataclass

from router.knobs import knobs
from router.settings import RoutingSettings, Settings, WorkerSpec

#: Taken over at once; all other settings need a new process.
_RELOADED = frozenset({"workers", "routing.policy", "routing.move_weight", "routing.session_headers"})


@dataclass(frozen=True, slots=True)
class Changes:
    """``leaving`` are workers by name, ``joining`` by what is told of them; a worker told otherwise is in both.

    ``ignored`` are the keys of settings that need a new process.
    """

    leaving: tuple[str, ...]
    joining: tuple[WorkerSpec, ...]
    ignored: tuple[str, ...]


def changes(before: Settings, after: Settings) -> Changes:
    """What to do to get from one to the other. Workers that were added by hand are in neither, and stay."""
    return Changes(
        leaving=tuple(spec.name for spec in before.workers if spec not in after.workers),
        joining=tuple(spec for spec in after.workers if spec not in before.workers),
        ignored=tuple(
            knob.key
            for knob in knobs()
            if knob.key not in _RELOADED and _value(before, knob.path) != _value(after, knob.path)
        ),
    )


def reloaded_routing(before: Settings, after: Settings) -> RoutingSettings:
    """The routing settings in force from now on."""
    taken = {
        name: getattr(after.routing, name) for name in RoutingSettings.model_fields if f"routing.{name}" in _RELOADED
    }
    return before.routing.model_copy(update=taken)


def _value(settings: object, path: tuple[str, ...]) -> object:
    for name in path:
        settings = getattr(settings, name)
    return settings
