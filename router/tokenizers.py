"""Where a model's tokenizer and chat template come from: a local path, or a worker that offers them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import httpx
from structlog.typing import FilteringBoundLogger

from router.core.types import Engine
from router.errors import ConfigError
from router.fleet.worker import Worker
from router.fleet.worker_api import WorkerInfo, fetch_tokenizer
from router.proxy.brain import RouterBrain
from router.proxy.tokenization import PromptTokenizer
from router.settings import ModelSpec

_NO_TEMPLATE: Final = (
    "no chat template: chats are keyed by their text, so predicted hits are rough; it stands beside tokenizer.json "
    "in chat_template.jinja or tokenizer_config.json"
)


def use_local(brain: RouterBrain, models: Sequence[ModelSpec], log: FilteringBoundLogger) -> None:
    """Load what the operator named. Raises ``ConfigError`` for files that are missing or damaged."""
    for model in models:
        for alias in model.aliases:
            brain.set_alias(alias, model.name)
        for adapter in model.adapters:
            brain.set_adapter(adapter)
        if model.tokenizer is not None:
            try:
                tokenizer = _made(*read_files(model.tokenizer))
            except ConfigError as error:
                raise ConfigError(f"the tokenizer of {model.name} at {model.tokenizer}: {error}") from error
            brain.set_tokenizer(model.name, tokenizer)
            if not tokenizer.has_template:
                log.warning(_NO_TEMPLATE, models=[model.name], tokenizer=str(model.tokenizer))
    for model in models:  # once all that have a tokenizer of their own have it
        for adapter in model.adapters:
            brain.share_tokenizer(adapter, of=model.name)


def _made(tokenizer_json: bytes, config: Mapping[str, Any]) -> PromptTokenizer:
    """Raises ``ConfigError`` for any damage: templates may nest without end, and configurations hold anything."""
    try:
        return PromptTokenizer.from_files(tokenizer_json, config)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"the tokenizer's configuration cannot be used: {error!r:.200}") from error


def read_files(path: Path) -> tuple[bytes, dict[str, Any]]:
    """``tokenizer.json`` and its configuration, with the chat template that stands beside them, as ``transformers``
    saves a model. ``path`` is the folder or the ``tokenizer.json`` in it. Raises ``ConfigError``.
    """
    folder, file = (path, path / "tokenizer.json") if path.is_dir() else (path.parent, path)
    try:
        tokenizer_json = file.read_bytes()
        config_file = folder / "tokenizer_config.json"
        config = json.loads(config_file.read_bytes()) if config_file.exists() else {}
        template_file = folder / "chat_template.jinja"
        if template_file.exists():
            config["chat_template"] = template_file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the tokenizer file {error.filename}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{folder / 'tokenizer_config.json'} is not JSON: {error}") from error
    return tokenizer_json, config


async def learn_from_worker(
    worker: Worker, brain: RouterBrain, client: httpx.AsyncClient, log: FilteringBoundLogger
) -> None:
    """Ask a worker for the tokenizer of models that have none yet; adapters that it names have that of their model.

    Raises ``ConfigError`` for a damaged one.
    """
    assert worker.info is not None
    parents = _parents(worker.info)
    if worker.info.engine is not Engine.SGLANG:  # which computes an adapter's name alone as the model below it
        for adapter in parents:
            brain.set_adapter(adapter)
    unknown = [
        model
        for model in worker.info.models
        if not brain.has_tokenizer(model) and not brain.share_tokenizer(model, of=parents.get(model, ""))
    ]
    if not unknown:
        return
    files = await fetch_tokenizer(client, worker.info.url)
    if files is None:
        log.warning(
            "no tokenizer: prompts are keyed by their text, so predicted hits are rough; "
            "give one with --model-tokenizer NAME=PATH",
            models=unknown,
            worker=worker.name,
        )
        return
    tokenizer = await asyncio.to_thread(_made, *files)
    for model in unknown:
        brain.set_tokenizer(model, tokenizer)
    if not tokenizer.has_template:
        log.warning(_NO_TEMPLATE, models=unknown, worker=worker.name)
    log.info("tokenizer learned from worker", models=unknown, worker=worker.name)


def _parents(info: WorkerInfo) -> dict[str, str]:
    """The models of adapters (LoRA), as engines list them."""
    told = ((name, card.get("parent")) for name, card in info.cards.items())
    return {name: parent for name, parent in told if isinstance(parent, str) and parent in info.models}
