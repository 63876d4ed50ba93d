"""What a reload changes, and what it says it cannot."""

from __future__ import annotations

from router.reload import changes, reloaded_routing
from router.settings import Policy, Settings


def settings(**values: object) -> Settings:
    return Settings.model_validate(values)


def test_workers_come_and_go_by_what_is_told_of_them() -> None:
    """Gone ones leave, new ones join, one that is told otherwise does both, the rest stays."""
    before = settings(workers=["http://a:1", {"url": "http://b:1", "dp_size": 1}, "http://c:1"])
    after = settings(workers=["http://c:1", {"url": "http://b:1", "dp_size": 2}, "http://d:1"])
    found = changes(before, after)
    assert found.leaving == ("a:1", "b:1")
    assert [spec.name for spec in found.joining] == ["b:1", "d:1"]
    assert found.ignored == ()


def test_what_needs_a_new_process_is_named() -> None:
    """Policy is taken over; the port and a breaker's failures are not, and are named."""
    before = settings()
    after = settings(
        server={"port": 9}, routing={"policy": "round_robin", "breaker_failures": 9, "session_headers": ["x-a"]}
    )
    found = changes(before, after)
    assert set(found.ignored) == {"server.port", "routing.breaker_failures"}
    taken = reloaded_routing(before, after)
    assert (taken.policy, taken.session_headers, taken.breaker_failures) == (Policy.ROUND_ROBIN, ("x-a",), 5)


def test_nothing_new() -> None:
    """The same settings change nothing."""
    before = settings(workers=["http://a:1"])
    assert changes(before, settings(workers=["http://a:1"])) == changes(settings(), settings())
