"""How much of a prompt others share: what tells a conversation's own history from a head that many begin with.

Where a chain of blocks goes on in another way than the prompt does, another conversation has been there, so that all
before is a head. Behind the last such fork a prompt goes on alone: whatever is held of that is its own past.

Not every fork is another conversation. An engine keeps an answer as it was made, and the next turn may bring it back
otherwise, without its reasoning for one. That leaves a single branch, and a short one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from router.core.chains import Step
from router.core.runs import Run

#: A single branch up to so long may be an answer that the next turn has left out.
_ANSWER_TOKENS = 2048


def shared_blocks(path: Sequence[Step], *, block_tokens: int) -> int:
    """Blocks of a prompt up to the last fork at which others have gone another way."""
    most = _ANSWER_TOKENS // block_tokens
    ahead: Run | None = None
    for start, run, shared in reversed(path):
        for at in sorted({shared, *run.branches}, reverse=True):
            if at <= shared:
                ways = _others(run, at, goes_on=at < shared, ahead=ahead if at == shared else None)
                if any(number or blocks > most for number, blocks in enumerate(ways)):
                    return start + at
        ahead = run
    return 0


def _others(run: Run, at: int, *, goes_on: bool, ahead: Run | None) -> Iterator[int]:
    """Lengths of the ways on from a place that the prompt does not take: not the run's own if it ``goes_on``, nor that
    into the run ``ahead``.
    """
    if not goes_on and len(run.keys) > at:
        yield len(run.keys) - at
    for branch in run.branches.get(at, ()):
        if branch is not ahead:
            yield len(branch.keys)
