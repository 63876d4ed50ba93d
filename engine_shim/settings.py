"""Every knob of the shim, with unit and default. Read by ``cli`` only and passed down in pieces.

Order of precedence: command line, environment (``HOMING_SHIM__`` and the name in capitals), default. An unknown
variable with that prefix or a bad value refuses to start and names the key.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from engine_shim.cache.transfers import WritePolicy
from engine_shim.types import SchedulingPolicy, WindowTails

ENV_PREFIX = "HOMING_SHIM__"
_Port = Annotated[int, Field(ge=0, le=65_535)]
_Positive = Annotated[int, Field(ge=1)]


class Role(StrEnum):
    """Which part of a request's work a shim does."""

    UNIFIED = "unified"
    PREFILL = "prefill"
    DECODE = "decode"


class DraftKind(StrEnum):
    """Who proposes drafts."""

    NGRAM = "ngram"
    HEAD = "draft"


class RunnerKind(StrEnum):
    """What a forward pass is."""

    TORCH = "torch"
    SIM = "sim"


class Device(StrEnum):
    """Where torch computes."""

    CPU = "cpu"
    CUDA = "cuda"


class AttentionKind(StrEnum):
    """What attends over the cache: torch, which gathers pages first, or kernels, which read them in place."""

    AUTO = "auto"
    TORCH = "torch"
    TRITON = "triton"
    FLASHINFER = "flashinfer"


class Dtype(StrEnum):
    """What weights and cache are stored as."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class KvCacheDtype(StrEnum):
    """What keys and values are stored as. The values are vLLM's."""

    AUTO = "auto"
    FP8 = "fp8_e4m3"


class LogLevel(StrEnum):
    """The least serious line that is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class SettingsError(Exception):
    """A setting is unknown or has a bad value. The message names the key."""


class ShimSettings(BaseModel):
    """One shim process. A port of 0 lets the system choose; a rank's event ports count up from rank 0's."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field("needle", description="needle (built in), smollm2, or a Hugging Face directory.")
    served_model_name: str | None = Field(None, description="Name in the API. Default: the model's.")
    host: str = Field("127.0.0.1", description="Address to listen on, also for events.")
    port: _Port = Field(8100, description="HTTP port.")
    dp_size: Annotated[int, Field(ge=1, le=64)] = Field(1, description="Ranks, each with a cache of its own.")
    device: Device = Field(Device.CPU, description="Where torch computes.")
    dtype: Dtype | None = Field(
        None, description="Weights and cache. Default: float32 on CPU and for needle, bfloat16 elsewhere."
    )
    kv_cache_dtype: KvCacheDtype = Field(
        KvCacheDtype.AUTO,
        description="Keys and values. auto: as dtype; fp8_e4m3: eight bits, with a scale for each head of each token.",
    )
    threads: _Positive = Field(1, description="CPU threads of torch.")
    attention: AttentionKind = Field(
        AttentionKind.AUTO,
        description="What attends over the cache. auto: on CUDA flashinfer where it is installed and fits, else triton "
        "where that is; torch elsewhere.",
    )
    graph_decodes: Annotated[int, Field(ge=0)] = Field(
        0, description="triton: steps of up to so many decodes are replayed as CUDA graphs; 0 for none."
    )
    role: Role = Field(
        Role.UNIFIED,
        description="prefill: compute prompts, which decode shims fetch. Both take SGLang's fields and vLLM's.",
    )
    bootstrap_port: _Port = Field(8998, description="prefill: port where decode shims fetch prompts.")
    handover_seconds: Annotated[float, Field(gt=0)] = Field(
        120.0, description="prefill and decode: how long one waits for the other."
    )
    transfer_rate: Annotated[float, Field(gt=0)] = Field(
        math.inf, description="decode: tokens fetched per second, in modelled time; inf for as fast as it goes."
    )
    runner: RunnerKind = Field(
        RunnerKind.TORCH, description="sim: a timing model in place of the forward pass; needs no torch."
    )
    sim_prefill_rate: Annotated[float, Field(gt=0)] = Field(
        20_000.0, description="sim: prompt tokens per second; inf for no time at all."
    )
    sim_decode_step: Annotated[float, Field(ge=0)] = Field(10.0, description="sim: milliseconds of a decode step.")
    sim_output_tokens: Annotated[int, Field(ge=0)] = Field(
        128,
        description="sim: tokens of an answer that neither max_tokens nor a stop ends, give or take half as many; "
        "0: it never ends by itself.",
    )
    page_tokens: Annotated[int, Field(ge=1, le=1024)] = Field(16, description="Tokens in a cache page.")
    pool_tokens: _Positive = Field(65_536, description="Cache of each rank, in tokens of full attention.")
    window_pool_tokens: _Positive | None = Field(
        None, description="Cache of each rank for sliding-window layers. Default: as pool_tokens."
    )
    window_tails: WindowTails = Field(
        WindowTails.STORED,
        description="The last window of a reused prefix, for sliding-window layers. stored: kept and copied like full "
        "attention; rebuilt: not copied, computed again where it is missing; ring: kept by nobody but who runs.",
    )
    state_slots: Annotated[int, Field(ge=2)] | None = Field(
        None, description="Recurrent states kept by each rank. Default: one per 256 of pool_tokens, 16 at least."
    )
    host_pool_tokens: _Positive | None = Field(
        None,
        description="Copies of each rank's cache in host memory, in tokens of full attention, from where prefixes are "
        "loaded back; a context may be as long as that, too. Default: none.",
    )
    disk_pool: Path | None = Field(
        None,
        description="Directory for copies of what is in host memory; the same model finds them there the next time.",
    )
    disk_pool_tokens: _Positive | None = Field(
        None, description="Copies of each rank's cache on disk, in tokens. Default: four times host_pool_tokens."
    )
    write_policy: WritePolicy = Field(
        WritePolicy.THROUGH,
        description="When pages are copied to the host: once stored, once used again, or before they are evicted.",
    )
    piece_tokens: _Positive = Field(4096, description="Tokens moved between device, host and disk in one go.")
    sim_move_rate: Annotated[float, Field(gt=0)] = Field(
        400_000.0, description="sim: tokens per second that move between device, host and disk."
    )
    max_running: _Positive = Field(64, description="Requests in one batch.")
    chunk_tokens: _Positive = Field(512, description="Tokens computed by one step.")
    scheduling_policy: SchedulingPolicy = Field(
        SchedulingPolicy.FCFS,
        description="Who is admitted first and preempted last. fcfs: who came first; priority: as requests ask.",
    )
    speculative: str | None = Field(
        None,
        description="KIND:K: try up to K drafts a step, which change no answer. ngram: out of the request's own text; "
        "draft: of the model's own draft head.",
    )
    overlap: bool | None = Field(
        None,
        description="Schedule and launch the next step while one runs; its tokens stay on the device. "
        "Default: on CUDA.",
    )
    shadow_steps: Annotated[int, Field(ge=0)] = Field(
        16, description="Of every so many steps check one request's cache slots against their shadow; 0 for never."
    )
    max_context_tokens: _Positive | None = Field(
        None,
        description="Prompt and answer together. Default: the model's limit, or what the larger of the pools on device "
        "and host holds.",
    )
    kv_events: bool = Field(True, description="publish cache events.")
    kv_events_port: _Port = Field(5557, description="Port of rank 0's events.")
    replay_port: _Port = Field(5657, description="Port of rank 0's replays.")
    max_body_bytes: Annotated[int, Field(ge=1024)] = Field(64 << 20, description="Larger bodies get 413.")
    shutdown_seconds: Annotated[float, Field(ge=0)] = Field(
        10.0, description="How long running requests may go on after SIGTERM or Ctrl-C."
    )
    log_level: LogLevel = Field(LogLevel.INFO, description="Least serious line that is logged.")

    @field_validator("disk_pool", mode="before")
    @classmethod
    def _names_a_directory(cls, value: object) -> object:
        if value == "":
            raise ValueError("an empty text names no directory")
        return value

    @field_validator("speculative")
    @classmethod
    def _kind_and_number(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"(ngram|draft):([1-9]|1\d|20)", value):
            raise ValueError("ngram:K or draft:K is needed, K from 1 to 20")
        return value

    @property
    def overlaps(self) -> bool:
        """Whether steps are launched ahead."""
        return self.device is Device.CUDA and self.runner is RunnerKind.TORCH if self.overlap is None else self.overlap

    @property
    def drafts(self) -> DraftKind | None:
        """Who proposes drafts, if anybody does."""
        return None if self.speculative is None else DraftKind(self.speculative.partition(":")[0])

    @property
    def draft_tokens(self) -> int:
        """How many drafts a request may have tried in one step."""
        return 0 if self.speculative is None else int(self.speculative.partition(":")[2])


def load_settings(arguments: Mapping[str, object], environment: Mapping[str, str]) -> ShimSettings:
    """Merge command line over environment over defaults. Raises ``SettingsError`` that names each bad key."""
    values: dict[str, object] = {}
    for name, value in environment.items():
        if name.startswith(ENV_PREFIX):
            key = name.removeprefix(ENV_PREFIX).lower()
            if key not in ShimSettings.model_fields:
                raise SettingsError(f"{name}: no such setting")
            values[key] = value
    try:
        return ShimSettings.model_validate({**values, **arguments})
    except ValidationError as error:
        faults = [
            f"{fault['loc'][0]}: {fault['msg'].removeprefix('Value error, ')} (got {fault['input']!r})"
            for fault in error.errors()
        ]
        raise SettingsError("; ".join(faults)) from error
