"""What the data plane's parts say to one another: attempts, outcomes, and the brain behind them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Final, Protocol

from router.core.breaker import Verdict
from router.core.types import Decision
from router.errors import RequestError
from router.fleet.target import Target
from router.wire.frozen import Frozen
from router.wire.openai import InferenceRequest
from router.wire.usage import Usage


class Outcome(StrEnum):
    """How an attempt ended. A label of ``homing_attempts_total``."""

    OK = "ok"
    CLIENT_ERROR = "client_error"  # the worker answered 4xx other than pushback: the request's own fault
    PUSHBACK = "pushback"  # 408, 429 or 503: full, not broken
    SERVER_ERROR = "server_error"  # any other 5xx; these three, too, where an answer with a good head tells an error
    CONNECT = "connect"  # no connection
    NO_SOCKET = "no_socket"  # nor could any other be opened: the router has reached a limit of its system
    RESET = "reset"  # the connection broke, before or after the first byte
    TIMEOUT = "timeout"
    PROTOCOL = "protocol"  # the worker's answer is not HTTP
    CLIENT_GONE = "client_gone"
    DEADLINE = "deadline"  # the client's own time was over
    SHUTDOWN = "shutdown"  # the router's own time was over
    FAULT = "fault"  # the router failed on it
    ABANDONED = "abandoned"  # the other rank of the pair failed

    __hash__ = str.__hash__  # the enum's own is a call into Python, several times a request

    @property
    def verdict(self) -> Verdict:
        """What it says of the rank: a client that errs or leaves says nothing of it."""
        return _VERDICTS[self]


#: Ends that no worker and no failure brought about: what was computed until then stays in the rank's cache.
BROKEN_OFF_HERE: Final = frozenset({Outcome.CLIENT_GONE, Outcome.DEADLINE, Outcome.SHUTDOWN})


class HoldEnd(StrEnum):
    """How waiting for room in the caches ended. A label of ``homing_admission_hold_seconds``."""

    RELEASED = "released"  # there was room
    LATE = "late"  # not within the longest wait
    LEFT = "left"  # the client left, or its time was over
    REFUSED = "refused"  # as many waited as may


#: Ends of attempts of which nothing was computed, unless the answer had begun.
COMPUTED_NOTHING: Final = frozenset({Outcome.CLIENT_ERROR, Outcome.PUSHBACK, Outcome.CONNECT, Outcome.NO_SOCKET})


_VERDICTS: Final = dict.fromkeys(Outcome, Verdict.BAD) | {
    Outcome.OK: Verdict.GOOD,
    Outcome.CLIENT_ERROR: Verdict.NEITHER,
    Outcome.PUSHBACK: Verdict.FULL,
    Outcome.NO_SOCKET: Verdict.NEITHER,
    Outcome.CLIENT_GONE: Verdict.NEITHER,
    Outcome.DEADLINE: Verdict.NEITHER,
    Outcome.SHUTDOWN: Verdict.NEITHER,
    Outcome.FAULT: Verdict.NEITHER,
    Outcome.ABANDONED: Verdict.NEITHER,
}


class Lease(Protocol):
    """One attempt's claim on a rank: its load and its provisional blocks. ``close`` must be called once."""

    def first_byte(self, generated: Callable[[], int] | None = None) -> None:
        """The first byte of the answer's body has arrived: prefill is over. ``generated`` counts the answer's tokens as
        they come.
        """

    def handed(self) -> None:
        """The decode half of a pair begins: the prompt has been computed elsewhere."""

    def worker_answers(self) -> bool | None:
        """Whether the worker answers probes; None where nobody probes it."""

    def beside(self) -> frozenset[int]:
        """Slots of the same worker, its own among them: where this one is not reached, none of them is."""

    def generated(self, ids: Sequence[int]) -> None:
        """Ids of the answer's tokens as far as they have come, of an answer that tells them."""

    def close(
        self,
        outcome: Outcome,
        usage: Usage | None,
        *,
        output: Sequence[int] = (),
        first_words: Callable[[], str] | None = None,
    ) -> None:
        """The attempt is over. Calls after the first do nothing. ``output``: ids of its tokens, where known;
        ``first_words`` tells the text that it began with.
        """


class Attempt(Frozen, frozen=True):
    """A decision made and opened. Of a pair of ranks it is the decode rank's, and ``prefill`` the other one's."""

    target: Target
    decision: Decision
    lease: Lease
    prefill: Attempt | None = None


class Prepared(Protocol):
    """A request with its session, tokens and block keys: what a decision needs, made once a request."""

    @property
    def model(self) -> str: ...

    @property
    def told_model(self) -> str:
        """What workers are told that is asked for: the model, or an adapter over it."""

    @property
    def is_splittable(self) -> bool:
        """Attempts may have a prefill leg."""


class Held(Protocol):
    """A request that waits for room in the caches."""

    def position(self) -> int | None:
        """Place in the queue, 1 at its head."""

    def leave(self, end: HoldEnd = HoldEnd.LEFT) -> int:
        """Wait no longer. Returns the seconds that one who comes now would wait."""


class Stage(Protocol):
    """What is being done for a request. It ends in the exchange's ``finish`` or ``fail``."""

    def pause(self) -> None:
        """The client does not keep up: stall what its answer comes from."""

    def resume(self) -> None:
        """The client has caught up."""

    def give_up(self, error: RequestError, outcome: Outcome) -> None:
        """End now. ``error`` is for the client, if it is still there; ``outcome`` is the attempt's."""


class Brain(Protocol):
    """The decision side of the router as the data plane sees it."""

    async def prepare(
        self, request: InferenceRequest, headers: Mapping[str, str], *, tenant: str, request_id: str
    ) -> Prepared:
        """Recognise the session and key the prompt. ``headers`` has lower-case names. Raises ``RequestError``."""

    def hold(self, prepared: Prepared, go: Callable[[], None], *, exclude: frozenset[int] = frozenset()) -> Held | None:
        """Whether the request must wait; None: it may be sent, not to ``exclude``. ``go`` is called when it may."""

    def choose(self, prepared: Prepared, *, exclude: frozenset[int] = frozenset()) -> Attempt:
        """Decide and open a lease. ``exclude`` holds slots that failed this request. Raises ``NoWorker``."""

    def full(self) -> frozenset[int]:
        """Slots that have just said that they are full."""

    def model_list(self) -> bytes:
        """The JSON answer of ``GET /v1/models``."""

    def model_card(self, name: str) -> bytes:
        """The JSON answer of ``GET /v1/models/NAME``. Raises ``NotFound``."""

    def ready(self) -> bool:
        """Some rank can take a request."""
