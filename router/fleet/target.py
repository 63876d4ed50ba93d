"""The address of a rank, and how its worker describes a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from router.core.types import WHOLE, Engine, Part

#: What a worker says of one of its models in ``/v1/models``: a JSON object, passed on as it is.
ModelCard = Mapping[str, object]


class Target(NamedTuple):
    """Where a rank's requests are sent, how that rank is named to its engine, and what it does of them.

    ``bootstrap_port`` is where decode ranks meet a prefill rank of SGLang's kind, on the same host.
    """

    host: str
    port: int
    rank: int
    dp_size: int
    engine: Engine
    base_path: str = ""
    tls: bool = False
    part: Part = WHOLE
    bootstrap_port: int | None = None

    @property
    def url(self) -> str:
        """The worker's base URL."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}{self.base_path}"
