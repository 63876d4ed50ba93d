"""What a soak looks at when all is over."""

from __future__ import annotations

from loadtest.soak import grown, loud_gauges

EXPOSITION = """\
# HELP homing_connections Clients.
# TYPE homing_connections gauge
homing_connections 0.0
# HELP homing_new_thing Of which the soak was never told.
# TYPE homing_new_thing gauge
homing_new_thing{rank="0"} 0.0
homing_new_thing{rank="1"} 2.0
# HELP homing_sessions Known sessions.
# TYPE homing_sessions gauge
homing_sessions 997.0
# HELP homing_requests_total Answered.
# TYPE homing_requests_total counter
homing_requests_total 5.0
# HELP process_open_fds Open files.
# TYPE process_open_fds gauge
process_open_fds 9.0
"""


def test_any_gauge_of_what_goes_on_must_be_zero() -> None:
    """Also one that is new; what the router knows may stay, and what the process has is no concern of a request."""
    assert list(loud_gauges(EXPOSITION)) == [("homing_new_thing", 2.0)]


def test_memory_may_grow_by_so_much_and_no_more() -> None:
    """From the first look to the last; what it was between does not count."""
    assert grown([80_000_000, 95_000_000, 88_000_000], 8_000_000) == []
    assert grown([80_000_000, 80_000_000], 0) == []
    (sentence,) = grown([80_000_000, 88_000_001], 8_000_000)
    assert "grew by 8.0 MB" in sentence
