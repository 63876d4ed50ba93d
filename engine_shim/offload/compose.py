"""What lies below a rank's device cache, made as the settings say."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engine_shim.cache.transfers import BackgroundMover, WritePolicy
from engine_shim.schedule.transit import OffloadPlan
from engine_shim.settings import ShimSettings
from engine_shim.types import CacheLayout

if TYPE_CHECKING:
    from engine_shim.runner.torch_runner import TorchRunner


@dataclass(frozen=True, slots=True)
class BelowDevice:
    """Sizes are tokens of full attention; other groups get the same share of their device pools."""

    host_tokens: int
    disk_folder: Path | None
    disk_tokens: int
    policy: WritePolicy
    piece_tokens: int

    def plan(self, layout: CacheLayout) -> OffloadPlan:
        """The same in pages."""
        return OffloadPlan(
            host_pages=_pages(layout, self.host_tokens),
            disk_pages=None if self.disk_folder is None else _pages(layout, self.disk_tokens),
            policy=self.policy,
            piece_pages=max(1, self.piece_tokens // layout.page_tokens),
        )


def below_device(settings: ShimSettings) -> BelowDevice | None:
    """None if nothing is kept below the device. Raises ``ValueError`` for a setting without what it is about."""
    if settings.disk_pool_tokens is not None and settings.disk_pool is None:
        raise ValueError("disk_pool_tokens: there is no disk_pool")
    if settings.host_pool_tokens is None:
        for name in ("disk_pool", "write_policy", "piece_tokens"):
            if name in settings.model_fields_set and getattr(settings, name) is not None:
                raise ValueError(f"{name}: pages are copied to the host first; host_pool_tokens is needed too")
        return None
    return BelowDevice(
        host_tokens=settings.host_pool_tokens,
        disk_folder=settings.disk_pool,
        disk_tokens=settings.disk_pool_tokens or 4 * settings.host_pool_tokens,
        policy=settings.write_policy,
        piece_tokens=settings.piece_tokens,
    )


def torch_mover(runner: TorchRunner, plan: OffloadPlan, *, folder: Path | None) -> BackgroundMover:
    """Pools below a torch rank, and what moves pages there and back. ``folder`` is that rank's alone.

    Raises ``OSError`` where the disk refuses.
    """
    from engine_shim.attention.buffers import TensorPages
    from engine_shim.offload.disk import DiskPool
    from engine_shim.offload.host import HostPool
    from engine_shim.offload.identity import fingerprint
    from engine_shim.offload.mover import ThreadMover

    host, disk = HostPool.allocate(runner.buffers, plan.host_pages), None
    if folder is not None and plan.disk_pages is not None:
        sizes = [host.page_bytes(group.index) for group in runner.layout.groups]
        disk = DiskPool(
            folder,
            fingerprint=fingerprint(runner.decoder, runner.layout, contents=TensorPages(runner.buffers).contents),
            page_tokens=runner.layout.page_tokens,
            page_bytes=sizes,
            pages=plan.disk_pages,
        )
    runner.read_below(host.buffers)
    return ThreadMover(runner.layout, device=runner.buffers, barrier=runner.barrier, host=host, disk=disk)


def _pages(layout: CacheLayout, tokens: int) -> tuple[int, ...]:
    share = tokens / ((layout.pages[0] - 1) * layout.page_tokens)
    return tuple(1 + max(1, round((pages - 1) * share)) for pages in layout.pages)
