"""The shim's composition root: settings to ranks, server and sockets, and the life of the process."""

from __future__ import annotations

import asyncio
import functools
import math
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING

import structlog
import uvicorn
import zmq
from tokenizers import Tokenizer

from engine_shim.chat import ChatTemplate
from engine_shim.engine import Engine
from engine_shim.events import Endpoints, EventPublisher
from engine_shim.grammar import GrammarCompiler
from engine_shim.model.loading import layout_for, load_decoder
from engine_shim.model.tokenizer import ModelCard, read_card
from engine_shim.runner.shadow import ShadowRunner
from engine_shim.runner.sim_runner import AnswerLength, SimRunner, StepTimes
from engine_shim.schedule.scheduler import Scheduler
from engine_shim.server import Handing, ServedModel, create_app
from engine_shim.settings import Device, DraftKind, Dtype, Role, RunnerKind, ShimSettings
from engine_shim.transfer.legs import RankPages, Transfer
from engine_shim.transfer.link import Offers
from engine_shim.transfer.parcel import NoContents
from engine_shim.types import CacheLayout, Runner

if TYPE_CHECKING:
    from engine_shim.model.decoder import Decoder

log = structlog.get_logger(__name__)
#: Idle connections of a router's pool stay open this long.
_KEEPALIVE_SECONDS = 120
_BACKLOG = 2048


class StartError(Exception):
    """The shim cannot start as it was told to; the message says why."""


@dataclass(frozen=True, slots=True)
class Shim:
    """A shim that is ready to serve: its door, its model and its ranks."""

    settings: ShimSettings
    door: socket.socket
    model: ServedModel
    engines: tuple[Engine, ...]
    handing: Handing | None = None

    @property
    def address(self) -> str:
        """Where HTTP is served, host:port."""
        host, port = self.door.getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def ready_line(self) -> str:
        """One line of ``name=value`` for whoever started the process; ports chosen by the system are in it."""
        line = f"homing shim ready http={self.address} model={self.model.name} ranks={len(self.engines)}"
        endpoints = [engine.publisher.endpoints for engine in self.engines if engine.publisher]
        if endpoints:
            line += " events=" + ",".join(str(each.port) for each in endpoints)
            line += " replay=" + ",".join(str(each.replay_port) for each in endpoints)
        if self.handing is not None:
            line += f" role={self.handing.role}"
            if self.handing.transfer.port:
                line += f" bootstrap={self.handing.transfer.port}"
        return line


def build(settings: ShimSettings) -> Shim:
    """Bind every port, then load the model, so that a taken port is told at once. On errors nothing stays open.

    Raises ``StartError``; what the model's loader raises passes through: ``FileNotFoundError``,
    ``MissingExtraError``, ``UnsupportedModelError``.
    """
    with ExitStack() as undo:
        door = undo.enter_context(_open_door(settings.host, settings.port))
        publishers = _open_publishers(settings, undo)
        bootstrap = None
        if settings.role is Role.PREFILL:
            bootstrap = undo.enter_context(_open_door(settings.host, settings.bootstrap_port))
        card = read_card(settings.model)
        layout = layout_for(
            card.config,
            page_tokens=settings.page_tokens,
            pool_tokens=settings.pool_tokens,
            window_pool_tokens=settings.window_pool_tokens,
            state_slots=settings.state_slots,
        )
        limit = settings.max_context_tokens or card.config.max_positions
        if limit > card.config.max_positions:
            raise StartError(f"max_context_tokens: {limit} exceeds the model's {card.config.max_positions}")
        schedulers = [_scheduler(settings, card, layout, limit) for _ in publishers]
        new_runner = _runners(settings, card, layout)
        runners = [new_runner() for _ in schedulers]
        watched = [
            _shadowed(settings, runner, layout, scheduler)
            for runner, scheduler in zip(runners, schedulers, strict=True)
        ]
        engines = tuple(
            Engine(
                rank,
                scheduler,
                runner=runner,
                layout=layout,
                publisher=publisher,
                clock=time.perf_counter,
            )
            for rank, (scheduler, runner, publisher) in enumerate(zip(schedulers, watched, publishers, strict=True))
        )
        pages = [_pages(runner, watcher) for runner, watcher in zip(runners, watched, strict=True)]
        undo.pop_all()
    return Shim(
        settings,
        door,
        _served(settings, card, schedulers[0].context_tokens),
        engines,
        _handing(settings, card, pages, bootstrap) if settings.role is not Role.UNIFIED else None,
    )


def run(shim: Shim) -> None:
    """Serve until SIGTERM or SIGINT; say on stdout when requests are taken."""
    app = create_app(shim.model, shim.engines, max_body_bytes=shim.settings.max_body_bytes, handing=shim.handing)
    grace_seconds = shim.settings.shutdown_seconds
    config = uvicorn.Config(
        app,
        http="httptools",
        log_config=None,
        access_log=False,
        timeout_keep_alive=_KEEPALIVE_SECONDS,
        # Engines are stopped when the grace is over; this is for a client that does not read its answer's end.
        timeout_graceful_shutdown=math.ceil(grace_seconds) + 2,
    )
    server = _Server(config, on_ready=functools.partial(_announce, shim))
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(_serve(server, shim, grace_seconds))


class _Server(uvicorn.Server):
    """uvicorn, but signals are ours: it would end the process by the signal, after a clean stop too."""

    def __init__(self, config: uvicorn.Config, *, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_ready()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve(server: _Server, shim: Shim, grace_seconds: float) -> None:
    loop = asyncio.get_running_loop()

    def end_running() -> None:
        for engine in shim.engines:
            engine.stop()

    def leave() -> None:
        """First signal: take nothing new and let answers finish. Second: end them."""
        if server.should_exit:
            end_running()
            return
        log.info("stopping", running=sum(engine.load for engine in shim.engines))
        server.should_exit = True
        loop.call_later(grace_seconds, end_running)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, leave)
    await server.serve(sockets=[shim.door])


def _announce(shim: Shim) -> None:
    print(shim.ready_line(), flush=True)  # noqa: T201 - the one line of output, meant for programs
    log.info("ready", address=shim.address, model=shim.model.name, ranks=len(shim.engines))


def _open_door(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise StartError(f"port {port} on {host}: {os.strerror(error.errno) if error.errno else error}") from error


def _open_publishers(settings: ShimSettings, undo: ExitStack) -> list[EventPublisher | None]:
    """One publisher per rank, all under one epoch id: this process, and no other, is the stream's source."""
    if not settings.kv_events:
        return [None] * settings.dp_size
    epoch = secrets.token_hex(8)
    publishers: list[EventPublisher | None] = []
    for rank in range(settings.dp_size):
        wanted = Endpoints(
            settings.host,
            settings.kv_events_port and settings.kv_events_port + rank,
            settings.replay_port and settings.replay_port + rank,
        )
        try:
            publisher = EventPublisher(wanted, rank=rank, epoch=epoch)
        except zmq.ZMQError as error:
            raise StartError(
                f"event ports of rank {rank} (kv_events_port {wanted.port}, replay_port {wanted.replay_port}) "
                f"on {settings.host}: {error.strerror}"
            ) from error
        undo.callback(publisher.close)
        publishers.append(publisher)
    return publishers


def _scheduler(settings: ShimSettings, card: ModelCard, layout: CacheLayout, limit: int) -> Scheduler:
    try:
        return Scheduler(
            layout,
            max_running=settings.max_running,
            chunk_tokens=settings.chunk_tokens,
            max_context_tokens=limit,
            eos_token_ids=frozenset(card.eos_token_ids),
            draft_tokens=settings.draft_tokens,
        )
    except ValueError as error:
        raise StartError(f"window_pool_tokens: {error}") from error


def _runners(settings: ShimSettings, card: ModelCard, layout: CacheLayout) -> Callable[[], Runner]:
    """What makes each rank's runner. Weights are loaded here, once, and shared by the ranks."""
    if settings.runner is RunnerKind.SIM:
        if settings.speculative is not None:
            raise StartError("speculative: a timing model has nothing to try drafts with; use --runner torch")
        times = StepTimes(
            prefill_tokens_per_second=settings.sim_prefill_rate,
            decode_step_seconds=settings.sim_decode_step / 1000,
        )
        return functools.partial(
            SimRunner, times, token_ids=_word_ids(card.tokenizer), answer_length=_answer_length(settings, card)
        )
    decoder = _torch_decoder(settings, card)
    from engine_shim.runner.torch_runner import TorchRunner
    from engine_shim.speculative.ngram import NgramDrafter

    def torch_runner() -> TorchRunner:
        drafter = NgramDrafter() if settings.drafts is DraftKind.NGRAM else None
        return TorchRunner(decoder, layout, drafter=drafter)

    return torch_runner


def _shadowed(settings: ShimSettings, runner: Runner, layout: CacheLayout, scheduler: Scheduler) -> Runner:
    """The runner, watched for corruption on a sample of its steps."""
    if not settings.shadow_steps:
        return runner
    return ShadowRunner(
        runner, layout, generations=scheduler.generations, every_steps=settings.shadow_steps, sample=True
    )


def _pages(runner: Runner, watcher: Runner) -> RankPages:
    """How pages go in and out of a rank, past its runner but not past the shadow."""
    noted = watcher.received if isinstance(watcher, ShadowRunner) else None
    if isinstance(runner, SimRunner):
        return RankPages(NoContents(), noted)
    from engine_shim.runner.torch_runner import TorchRunner
    from engine_shim.transfer.torch_pages import TorchPages

    assert isinstance(runner, TorchRunner)
    return RankPages(TorchPages(runner), noted)


def _handing(
    settings: ShimSettings, card: ModelCard, pages: Sequence[RankPages], bootstrap: socket.socket | None
) -> Handing:
    return Handing(
        settings.role,
        Transfer(
            model=settings.served_model_name or card.name,
            pages=pages,
            seconds=settings.handover_seconds,
            tokens_per_second=settings.transfer_rate,
            port=bootstrap.getsockname()[1] if bootstrap is not None else 0,
            offers=Offers(seconds=settings.handover_seconds) if bootstrap is not None else None,
        ),
        bootstrap,
    )


def _torch_decoder(settings: ShimSettings, card: ModelCard) -> Decoder:
    if find_spec("torch") is None:
        raise StartError("runner: torch is not installed: pip install 'homing[engine]', or use --runner sim")
    import torch

    if settings.device is Device.CUDA and not torch.cuda.is_available():
        raise StartError("device: no CUDA device is usable here")
    torch.set_num_threads(settings.threads)
    dtypes = {
        Dtype.FLOAT32: torch.float32,
        Dtype.BFLOAT16: torch.bfloat16,
        Dtype.FLOAT16: torch.float16,
    }
    dtype = None if settings.dtype is None else dtypes[settings.dtype]
    return load_decoder(card, device=settings.device, dtype=dtype)


def _answer_length(settings: ShimSettings, card: ModelCard) -> AnswerLength | None:
    if not settings.sim_output_tokens or not card.eos_token_ids:
        return None
    return AnswerLength(settings.sim_output_tokens, min(card.eos_token_ids))


def _word_ids(tokenizer: Tokenizer) -> Sequence[int]:
    """What the sim runner answers with: plain words where the vocabulary marks them, else all but special tokens."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    words = [
        token_id
        for token, token_id in vocabulary.items()
        if token[:1] in ("Ġ", "▁") and token[1:].isascii() and token[1:].isalpha()
    ]
    special = {id_ for id_, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    return sorted(words or set(vocabulary.values()) - special)


def _served(settings: ShimSettings, card: ModelCard, limit: int) -> ServedModel:
    special = {"bos_token": card.bos_token or "", "eos_token": card.eos_token or ""}
    template = card.chat_template
    return ServedModel(
        name=settings.served_model_name or card.name,
        tokenizer=card.tokenizer,
        template=ChatTemplate(template, special_tokens=special) if template is not None else None,
        tokenizer_config={
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": card.bos_token,
            "eos_token": card.eos_token,
            "chat_template": template,
            "model_max_length": card.config.max_positions,
        },
        vocab_tokens=card.config.vocab_size,
        max_context_tokens=limit,
        version=_version(),
        has_logits=settings.runner is RunnerKind.TORCH,
        grammars=_grammars(settings, card),
    )


def _grammars(settings: ShimSettings, card: ModelCard) -> GrammarCompiler | None:
    """What holds answers to a grammar, where the runner has logits, the model an end and the library is there."""
    if settings.runner is not RunnerKind.TORCH or not card.eos_token_ids or find_spec("llguidance") is None:
        return None
    return GrammarCompiler(
        card.tokenizer, vocab_tokens=card.config.vocab_size, eos_token_ids=sorted(card.eos_token_ids)
    )


def _version() -> str:
    try:
        return version("homing")
    except PackageNotFoundError:  # run from a source tree
        return "source"
