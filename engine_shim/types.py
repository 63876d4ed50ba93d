"""The nouns of the engine: what a cache group, a request, a batch and a runner are. Read this first.

One *rank* is one scheduler, one cache and one runner. A *step* is: schedule a batch, run it, commit
the sampled tokens. A *page* is the unit of cache memory, ``page_tokens`` tokens of one group. Page 0 of
every pool is the null page: it stands in page tables where nothing is held and is never read or handed out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

NULL_PAGE = 0


class GroupKind(StrEnum):
    """How the layers of a cache group look back. The values are vLLM's ``kv_cache_spec_kind``.

    A draft group, which looks back over everything as well, belongs to a draft head; nobody is told of it.
    """

    FULL = "full_attention"
    WINDOW = "sliding_window"
    STATE = "mamba"
    DRAFT = "draft"


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that share one page table and one pool. Of a state group a *page* is one slot, with one sequence's state.

    ``window_tokens`` counts the query itself: position q reads keys in (q - window, q]
    (vLLM's and transformers' convention; SGLang's number is one less).
    """

    index: int
    kind: GroupKind
    layers: tuple[int, ...]
    window_tokens: int | None = None


class WindowTails(StrEnum):
    """Where the sliding-window layers of a reused prefix have their last window from."""

    STORED = "stored"
    REBUILT = "rebuilt"
    RING = "ring"


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The cache of one rank: groups and, for each, how many pages its pool has (null page included).

    Group 0 is the full-attention group, a window group follows, then a state group, if the model has such layers; last
    comes the group of the draft head, if one drafts, with as many pages as group 0.
    Long prompts leave a state every ``checkpoint_tokens`` (a multiple of the page).

    ``window_tails``: *stored* windows are kept like full pages, on the device and below it. *Rebuilt* ones are kept on
    the device as long as there is room and not copied; a prefix without is computed again, as far as its last window
    needs, while full layers read what they have. With *rings* window layers keep nothing for others, each request has
    ``ring_pages`` pages of its own to go round in, and every prefix is rebuilt. A state cannot be rebuilt, so layouts
    with states store.
    """

    page_tokens: int
    groups: tuple[CacheGroup, ...]
    pages: tuple[int, ...]
    checkpoint_tokens: int = 2048
    window_tails: WindowTails = WindowTails.STORED
    ring_pages: int = 0

    @property
    def window(self) -> CacheGroup | None:
        """The sliding-window group, if there is one."""
        return next((group for group in self.groups if group.kind is GroupKind.WINDOW), None)

    @property
    def state(self) -> CacheGroup | None:
        """The group of recurrent layers, if there is one."""
        return next((group for group in self.groups if group.kind is GroupKind.STATE), None)

    @property
    def draft(self) -> CacheGroup | None:
        """The group of the draft head, if there is one."""
        return next((group for group in self.groups if group.kind is GroupKind.DRAFT), None)

    def places(self) -> dict[int, tuple[CacheGroup, int]]:
        """The group of each layer, and the row of the group's tensors that is the layer's."""
        return {layer: (group, row) for group in self.groups for row, layer in enumerate(group.layers)}

    def window_pages(self) -> int:
        """Pages before a match boundary that must be resident in the window group: ceil((W-1)/page)."""
        if self.window is None or self.window.window_tokens is None:
            return 0
        return -(-(self.window.window_tokens - 1) // self.page_tokens)

    def require_room(self) -> None:
        """Raise ``ValueError`` if not even one request can run."""
        if self.state is not None and self.pages[self.state.index] < 3:
            raise ValueError("a state pool has a slot to read and one to write at least, beside the null slot")
        if self.window is None:
            return
        reach, pages = self.window_pages(), self.pages[self.window.index]
        if pages - 1 <= reach:
            raise ValueError(
                f"a window pool of {pages} pages (one is the null page) is too small: "
                f"{reach} pages of window and the page in progress must fit"
            )
        if self.window_tails is not WindowTails.STORED and self.state is not None:
            raise ValueError("a recurrent state cannot be rebuilt, so windows beside one have to be stored")
        if self.window_tails is WindowTails.RING and not reach < self.ring_pages < pages:
            raise ValueError(f"a ring of {self.ring_pages} pages: it needs {reach + 1} at least, {pages - 1} at most")

    def rebuild_tokens(self, pages: int) -> int:
        """Where computing has to begin so that behind ``pages`` pages the whole window is right; a page boundary.

        A layer's keys are right where its input is. Each window layer in between looks a window further back, and what
        it misses there it passes on: after k of them all is right from k * (W - 1) positions behind the beginning on.
        """
        if self.window is None or self.window.window_tokens is None:
            return pages * self.page_tokens
        first = (pages - self.window_pages()) * self.page_tokens
        passed_on = (len(self.window.layers) - 1) * (self.window.window_tokens - 1)
        return max(0, first - passed_on) // self.page_tokens * self.page_tokens

    def resume_tokens(self, usable_pages: int, full_pages: int) -> int:
        """Where computing begins behind a prefix of which the full layers have ``full_pages``, all ``usable_pages``."""
        match self.window_tails:
            case WindowTails.STORED:
                return usable_pages * self.page_tokens
            case WindowTails.REBUILT:
                return max(usable_pages * self.page_tokens, self.rebuild_tokens(full_pages))
            case WindowTails.RING:
                return self.rebuild_tokens(full_pages)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen and when a request ends. Stop *strings* are the server's matter.

    Names and meanings are OpenAI's and vLLM's; each default changes nothing. ``top_k`` 0 keeps every token,
    ``min_p`` drops those less likely than so much of the likeliest. Presence and frequency are counted over the
    output, repetition over prompt and output. ``logit_bias`` is of pairs (token, bias). No stop token is sampled
    before ``min_tokens``. ``logprobs``: tell each token's, and those of so many likeliest; None tells nothing.
    """

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    logprobs: int | None = None
    seed: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False


class FinishReason(StrEnum):
    """Why a request ended; ``stop`` and ``length`` are the API's words."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class SchedulingPolicy(StrEnum):
    """Whether requests are served by arrival alone, or by their priority first. The values are vLLM's."""

    FCFS = "fcfs"
    PRIORITY = "priority"


class ConstraintError(RuntimeError):
    """A grammar cannot be followed any further, whatever comes next: it has outgrown its limits."""


class Constraint(Protocol):
    """Which tokens may follow an output: a grammar at work, one for each request.

    It follows the request by its output alone, so neither a preemption nor a draft that is rejected needs any care.
    Only the rank's thread calls it.
    """

    def fitting(self, output: Sequence[int], drafts: Sequence[int]) -> int:
        """How many of ``drafts`` may follow ``output``, one after the other."""
        ...

    def masks(self, output: Sequence[int], drafts: Sequence[int]) -> list[bytes]:
        """What may follow ``output``, and what each of the ``drafts`` that fit behind it.

        One bit a token, the lowest of the first byte is token 0. Raises ``ConstraintError``.
        """
        ...


@dataclass(slots=True, eq=False, weakref_slot=True)
class Request:
    """One sequence from arrival to end. The scheduler alone mutates it after ``add``.

    Positions, in tokens of ``prompt + output``::

        0 ........ cached ........ computed ........ len(tokens)
        reused from the tree   | run through layers | still to run (prefill rest, or the last sampled token)

    ``tables[g][i]`` is the page of group g that holds positions [i*page, (i+1)*page), or NULL_PAGE
    where the window has passed. Of a state group the table is ``[slot to read, slot to write]``: the state after the
    computed tokens (NULL_PAGE: there are none, the state is zero) and where the next chunk leaves its own; both may
    be one slot.

    ``priority``: a lower one is served earlier, where the scheduler goes by it.
    """

    id: str
    prompt: tuple[int, ...]
    sampling: Sampling
    namespace: str = ""
    priority: int = 0
    arrival_seconds: float = 0.0
    constraint: Constraint | None = None
    tokens: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    computed_tokens: int = 0
    tables: tuple[list[int], ...] = ()
    finish: FinishReason | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def output(self) -> list[int]:
        """Tokens sampled so far."""
        return self.tokens[len(self.prompt) :]


@dataclass(frozen=True, slots=True)
class Sunk:
    """Pages of a context that are on the host alone: of the full group page ``first + i``, in host slot ``slots[i]``.

    Where they would stand in the full table is NULL_PAGE. They are read where they lie, and nobody writes them.
    """

    first: int
    slots: tuple[int, ...]

    @property
    def end(self) -> int:
        """The page behind them."""
        return self.first + len(self.slots)

    def up_to(self, pages: int) -> Sunk | None:
        """Those among the first ``pages`` pages of the context."""
        return Sunk(self.first, self.slots[: pages - self.first]) if pages > self.first else None


@dataclass(frozen=True, slots=True)
class Chunk:
    """One request's share of a batch: run positions [start, start + count).

    ``tables`` are the request's page tables, already long enough for ``start + count`` tokens and not
    changed until the batch is committed. ``samples``: the logits of the last position choose a token.
    ``draws`` is the number of tokens this request has sampled before: with the seed it names the random draw.
    ``room``: so many draft tokens the runner may try behind the chunk; the tables are long enough for them too.

    A chunk that rebuilds a window: positions before ``rebuilt_until`` have their place in all but the window group
    already, which is read and not written, and window layers look back to ``window_start`` only.

    ``awaits_token``: the token at ``start``, the only one of the chunk, is what the step launched before has sampled
    for this request, which the host does not know yet. The ``tables`` are then the chunk's own.

    ``sunk``: what of a context longer than the device's pool the full layers read on the host; all before ``start``.
    """

    request: Request
    start: int
    count: int
    tables: tuple[Sequence[int], ...]
    samples: bool
    draws: int
    room: int = 0
    rebuilt_until: int = 0
    window_start: int = 0
    awaits_token: bool = False
    sunk: Sunk | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """What one step runs: decodes (count 1) and prefill chunks together.

    ``loads`` are transfers that write pages of the chunks and may still be under way: before a layer reads or writes
    its part of a pool, what they bring to that part has landed.
    """

    chunks: tuple[Chunk, ...]
    loads: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        """Positions computed by this step, drafts aside."""
        return sum(chunk.count for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural logarithms of probabilities: a sampled token's own, and the likeliest ones, (token, logprob) each."""

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Sampled:
    """What one chunk came to: the drafts that held, in order, and the token after them.

    ``logprobs`` has an entry for each token, or none if nobody asked. Of ``drafted`` tried tokens all but the last of
    ``tokens`` held. No tokens at all: the request cannot go on. ``awaited`` is what the device has read for the token
    that the chunk awaited; None where there was none, or the runner does not tell.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    drafted: int = 0
    awaited: int | None = None


@dataclass(frozen=True, slots=True)
class Output:
    """What a committed step tells about one request: new tokens (with ``logprobs`` if asked), an end, or both."""

    request: Request
    tokens: tuple[int, ...]
    finish: FinishReason | None
    logprobs: tuple[TokenLogprob, ...] = ()


class Runner(Protocol):
    """Runs a batch: writes its keys and values into the pools, returns sampled tokens.

    Pages are written only at positions of the batch's chunks and of their ``room``; every other position of a table is
    read only, and so is a state slot that is not the slot to write. What stands at drafts that did not hold is of
    no use to anybody; a state slot is left as after the last draft that did. Returns what each chunk with
    ``samples`` came to, in order. Synchronous; called from the rank's own thread.
    """

    def run(self, batch: Batch) -> list[Sampled]: ...


#: Waits for a launched step and returns, or raises, what ``run`` would have. Called once.
StepLanding = Callable[[], list[Sampled]]


class LaunchingRunner(Runner, Protocol):
    """A runner that can have a step run while its caller goes on.

    Steps run in the order in which they are launched, each before the next, and land in that order. All that a step
    needs of its batch but the awaited tokens is read before ``launch`` returns. What it raises of its own may be told
    by the landing. Called from the rank's own thread.
    """

    def launch(self, batch: Batch) -> StepLanding: ...
