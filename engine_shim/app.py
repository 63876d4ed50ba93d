"""The shim's composition root: settings to ranks, server and sockets."""

from __future__ import annotations

import errno
import functools
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, cast

import structlog
import zmq
from tokenizers import Tokenizer

from engine_shim.cache.transfers import BackgroundMover
from engine_shim.chat import ChatTemplate
from engine_shim.engine import Engine
from engine_shim.events import Endpoints, EventPublisher
from engine_shim.grammar import GrammarCompiler
from engine_shim.model.loading import layout_for, load_decoder
from engine_shim.model.tokenizer import ModelCard, read_card
from engine_shim.offload.compose import BelowDevice, below_device, torch_mover
from engine_shim.offload.sim_mover import SimMover
from engine_shim.process import Shim
from engine_shim.runner.shadow import ShadowRunner
from engine_shim.runner.shadow_mover import ShadowMover
from engine_shim.runner.sim_runner import AnswerLength, SimRunner, StepTimes
from engine_shim.schedule.scheduler import Scheduler
from engine_shim.schedule.transit import OffloadPlan
from engine_shim.server import Handing, ServedModel
from engine_shim.settings import AttentionKind, Device, DraftKind, Dtype, KvCacheDtype, Role, RunnerKind, ShimSettings
from engine_shim.transfer.legs import RankPages, Transfer
from engine_shim.transfer.link import Offers
from engine_shim.transfer.parcel import NoContents
from engine_shim.types import CacheLayout, Runner, WindowTails

if TYPE_CHECKING:
    from engine_shim.model.decoder import Decoder
    from engine_shim.runner.torch_runner import TorchRunner
    from engine_shim.speculative.drafter import Drafter

log = structlog.get_logger(__name__)
_BACKLOG = 2048


class StartError(Exception):
    """The shim cannot start as it was told to; the message says why."""


def build(settings: ShimSettings) -> Shim:
    """Bind every port, then load the model, so that a taken port is told at once. On errors nothing stays open.

    Raises ``StartError``; what the model's loader raises passes through: ``FileNotFoundError``,
    ``MissingExtraError``, ``UnsupportedModelError``.
    """
    with ExitStack() as undo:
        door = undo.enter_context(_open_door(settings.host, settings.port, option="--port"))
        publishers = _open_publishers(settings, undo)
        bootstrap = None
        if settings.role is Role.PREFILL:
            door_for_decode = _open_door(settings.host, settings.bootstrap_port, option="--bootstrap-port")
            bootstrap = undo.enter_context(door_for_decode)
        try:
            below = below_device(settings)
        except ValueError as error:
            raise StartError(str(error)) from error
        card = read_card(settings.model)
        layout = layout_for(
            card.config,
            page_tokens=settings.page_tokens,
            pool_tokens=settings.pool_tokens,
            window_pool_tokens=settings.window_pool_tokens,
            state_slots=settings.state_slots,
            draft_head=settings.drafts is DraftKind.HEAD,
            window_tails=settings.window_tails,
            chunk_tokens=settings.chunk_tokens,
        )
        _check_tails(settings, layout)
        limit = settings.max_context_tokens or card.config.max_positions
        if limit > card.config.max_positions:
            raise StartError(f"max_context_tokens: {limit} exceeds the model's {card.config.max_positions}")
        new_runner = _runners(settings, card, layout)
        runners = [new_runner() for _ in publishers]
        movers = [_mover(settings, layout, below, runner, undo, rank=rank) for rank, runner in enumerate(runners)]
        schedulers = [
            _scheduler(settings, card, layout, limit, plan=below.plan(layout) if below else None, mover=mover)
            for mover in movers
        ]
        watched = [
            _shadowed(settings, runner, layout, scheduler, mover)
            for runner, scheduler, mover in zip(runners, schedulers, movers, strict=True)
        ]
        engines = tuple(
            Engine(
                rank,
                scheduler,
                runner=runner,
                layout=layout,
                publisher=publisher,
                clock=time.perf_counter,
                mover=mover,
                overlaps=settings.overlaps,
            )
            for rank, (scheduler, runner, publisher, mover) in enumerate(
                zip(schedulers, watched, publishers, movers, strict=True)
            )
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


def _open_door(host: str, port: int, *, option: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        remedy = f"; choose another with {option}" if error.errno == errno.EADDRINUSE else ""
        reason = str(error.strerror or error).partition(" (while")[0]
        raise StartError(f"cannot listen on port {port} of {host}: {reason}{remedy}") from error


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
                f"cannot publish the events of rank {rank}: {error.strerror}; "
                "choose rank 0's ports with --kv-events-port and --replay-port"
            ) from error
        undo.callback(publisher.close)
        publishers.append(publisher)
    return publishers


def _mover(
    settings: ShimSettings,
    layout: CacheLayout,
    below: BelowDevice | None,
    runner: Runner,
    undo: ExitStack,
    *,
    rank: int,
) -> BackgroundMover | None:
    """What moves a rank's pages below the device, watched as the runner is."""
    if below is None:
        return None
    mover: BackgroundMover
    if isinstance(runner, SimRunner):
        mover = SimMover(settings.sim_move_rate, page_tokens=layout.page_tokens)
    else:
        folder = None if below.disk_folder is None else below.disk_folder / f"rank-{rank}"
        try:
            mover = torch_mover(cast("TorchRunner", runner), below.plan(layout), folder=folder)
        except OSError as error:
            raise StartError(f"disk_pool: {error}") from error
    undo.callback(mover.close)
    return ShadowMover(mover, layout) if settings.shadow_steps else mover


def _scheduler(
    settings: ShimSettings,
    card: ModelCard,
    layout: CacheLayout,
    limit: int,
    *,
    plan: OffloadPlan | None,
    mover: BackgroundMover | None,
) -> Scheduler:
    try:
        return Scheduler(
            layout,
            max_running=settings.max_running,
            chunk_tokens=settings.chunk_tokens,
            max_context_tokens=limit,
            eos_token_ids=frozenset(card.eos_token_ids),
            draft_tokens=settings.draft_tokens,
            policy=settings.scheduling_policy,
            offload=plan,
            mover=mover,
        )
    except ValueError as error:
        raise StartError(f"window_pool_tokens: {error}") from error


def _runners(settings: ShimSettings, card: ModelCard, layout: CacheLayout) -> Callable[[], Runner]:
    """What makes each rank's runner. Weights are loaded here, once, and shared by the ranks."""
    if settings.runner is RunnerKind.SIM:
        if settings.speculative is not None:
            raise StartError("speculative: a timing model has nothing to try drafts with; use --runner torch")
        if settings.kv_cache_dtype is not KvCacheDtype.AUTO:
            raise StartError("kv_cache_dtype: a timing model keeps no keys and values; use --runner torch")
        if settings.overlap:
            raise StartError("overlap: a timing model runs nothing that could be overlapped; use --runner torch")
        times = StepTimes(
            prefill_tokens_per_second=settings.sim_prefill_rate,
            decode_step_seconds=settings.sim_decode_step / 1000,
        )
        return functools.partial(
            SimRunner, times, token_ids=_word_ids(card.tokenizer), answer_length=_answer_length(settings, card)
        )
    decoder = _torch_decoder(settings, card)
    from engine_shim.attention.choice import choose_attention
    from engine_shim.offload.barrier import LayerBarrier
    from engine_shim.runner.torch_runner import TorchRunner
    from engine_shim.speculative.head import HeadDrafter
    from engine_shim.speculative.ngram import NgramDrafter

    try:
        attention = choose_attention(settings, head_dim=decoder.config.head_dim, dtype=decoder.dtype)
    except ValueError as error:
        raise StartError(str(error)) from error
    if settings.drafts is DraftKind.HEAD and decoder.weights.draft is None:
        raise StartError("speculative: the model has no draft head (weights named mtp.*)")

    def torch_runner() -> TorchRunner:
        barrier = LayerBarrier()
        drafter: Drafter | None = None
        match settings.drafts:
            case DraftKind.NGRAM:
                drafter = NgramDrafter()
            case DraftKind.HEAD:
                drafter = HeadDrafter(decoder, layout, barrier=barrier)
        return TorchRunner(
            decoder,
            layout,
            drafter=drafter,
            barrier=barrier,
            kernels=attention is AttentionKind.TRITON,
            flashinfer=attention is AttentionKind.FLASHINFER,
            fp8=settings.kv_cache_dtype is KvCacheDtype.FP8,
            graph_decodes=settings.graph_decodes,
            overlaps=settings.overlaps,
        )

    return torch_runner


def _check_tails(settings: ShimSettings, layout: CacheLayout) -> None:
    """Raise ``StartError`` where windows cannot be rebuilt."""
    if settings.window_tails is WindowTails.STORED or layout.window is None:
        return
    if layout.state is not None:
        raise StartError("window_tails: a recurrent state cannot be rebuilt, so windows beside one have to be stored")
    if settings.window_tails is WindowTails.RING and settings.role is not Role.UNIFIED:
        raise StartError("window_tails: what is in a ring is not handed over; use stored or rebuilt, or no role")


def _shadowed(
    settings: ShimSettings, runner: Runner, layout: CacheLayout, scheduler: Scheduler, mover: BackgroundMover | None
) -> Runner:
    """The runner, watched for corruption on a sample of its steps."""
    if not settings.shadow_steps:
        return runner
    shadow = ShadowRunner(
        runner, layout, generations=scheduler.generations, every_steps=settings.shadow_steps, sample=True
    )
    if isinstance(mover, ShadowMover):
        mover.attach(shadow, scheduler.copy_generations)
    return shadow


def _pages(runner: Runner, watcher: Runner) -> RankPages:
    """How pages go in and out of a rank, past its runner but not past the shadow."""
    noted = watcher.received if isinstance(watcher, ShadowRunner) else None
    if isinstance(runner, SimRunner):
        return RankPages(NoContents(), noted)
    from engine_shim.attention.buffers import TensorPages
    from engine_shim.runner.torch_runner import TorchRunner

    assert isinstance(runner, TorchRunner)
    return RankPages(TensorPages(runner.buffers), noted)


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
