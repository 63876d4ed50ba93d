"""Restarts that a recording tells of only by a sequence that begins anew."""

from __future__ import annotations

from array import array

import pytest

from router.capture.format import Frame, Reset, Sent
from router.capture.restarts import noticed_restarts


def frame(at: float, sequence: int, *, rank: int = 0) -> Frame:
    return Frame(at, rank, sequence, None)


def sent(at: float, finished_at: float, *, is_failed: bool = False) -> Sent:
    return Sent(
        at=at,
        first_token_at=None,
        finished_at=finished_at,
        model="m",
        tag="",
        prompt=array("I", [1]),
        output=array("I"),
        rank=0,
        cached_tokens=None,
        is_failed=is_failed,
        is_cut=False,
        fields={},
    )


OLD_AND_NEW = [frame(1.0, 0), frame(2.0, 1), frame(30.2, 0), frame(31.0, 1)]


@pytest.mark.parametrize(
    ("requests", "expected"),
    [
        ([sent(1.0, 2.5), sent(30.0, 31.0), sent(30.1, 31.0)], {30.0}),
        # what nobody answered is no sign of life
        (
            [sent(1.0, 2.5), sent(10.0, 10.1, is_failed=True), sent(29.9, 29.95, is_failed=True), sent(30.0, 31.0)],
            {30.0},
        ),
        # it was never away for two seconds: nobody has looked
        ([sent(1.0, 28.5), sent(30.0, 31.0)], set()),
        # the new process told of itself first
        ([sent(1.0, 2.5), sent(30.5, 31.0)], set()),
    ],
)
def test_a_router_has_found_another_process_after_a_silence(requests: list[Sent], expected: set[float]) -> None:
    """Probes come every two seconds."""
    assert {reset.at for reset in noticed_restarts(OLD_AND_NEW, requests, [])} == expected


def test_a_restart_that_was_recorded_is_no_second_one() -> None:
    """Nor is a reset in its place, after which the sequence goes on."""
    requests = [sent(1.0, 2.5), sent(30.0, 31.0)]

    assert noticed_restarts(OLD_AND_NEW, requests, [Reset(20.0, is_restart=True)]) == set()
    assert noticed_restarts(OLD_AND_NEW, requests, [Reset(20.0)]) == {Reset(30.0, is_restart=True)}


def test_ranks_of_one_process_restart_together() -> None:
    """And none where sequences go on."""
    requests = [sent(1.0, 2.5), sent(30.0, 31.0)]
    both = sorted([*OLD_AND_NEW, *(frame(each.at + 0.01, each.sequence or 0, rank=1) for each in OLD_AND_NEW)], key=_at)

    assert noticed_restarts(both, requests, []) == {Reset(30.0, is_restart=True)}
    assert noticed_restarts([frame(1.0, 0), frame(30.2, 1), frame(30.3, 1)], requests, []) == set()


def _at(frame: Frame) -> float:
    return frame.at
