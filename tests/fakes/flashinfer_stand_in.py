"""FlashInfer's two wrappers for a machine without a GPU: its arguments by its names, and what its documentation says.

The query of row i of a sequence with q queries and k keys stands at k - q + i; it sees itself and the keys before it,
of which a window has the last ``window_left``. Keys are the tokens of the pages but for those behind ``last_page_len``
in the last page. A plan holds until the next one of the same wrapper.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Planned:
    """One plan: pages and lengths of each sequence, and what holds for all of them."""

    query_starts: Tensor
    page_starts: Tensor
    pages: Tensor
    last_tokens: Tensor
    heads: tuple[int, int, int]
    page_size: int
    scale: float
    window_left: int
    types: tuple[torch.dtype, torch.dtype]

    def lengths(self) -> list[int]:
        counts = self.page_starts.diff().tolist()
        return [(count - 1) * self.page_size + last for count, last in zip(counts, self.last_tokens, strict=True)]


#: Attention of one plan; ``query`` ``[rows, heads, head_dim]`` over pages ``[pages, page_size, kv_heads, head_dim]``.
Attend = Callable[[Planned, Tensor, Tensor, Tensor], Tensor]


def documented(plan: Planned, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Sequence by sequence, in float64."""
    out = torch.empty_like(query)
    starts, bounds = plan.query_starts.tolist(), plan.page_starts.tolist()
    for number, length in enumerate(plan.lengths()):
        rows = slice(starts[number], starts[number + 1])
        held = plan.pages[bounds[number] : bounds[number + 1]].long()
        repeats = plan.heads[0] // plan.heads[1]
        k, v = (
            each[held].flatten(0, 1)[:length].double().repeat_interleave(repeats, dim=1).transpose(0, 1)
            for each in (keys, values)
        )
        count = rows.stop - rows.start
        back = torch.arange(length - count, length)[:, None] - torch.arange(length)
        seen = (back >= 0) & ((back <= plan.window_left) | torch.tensor(plan.window_left < 0))
        scores = query[rows].double().transpose(0, 1) @ k.mT * plan.scale
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        out[rows] = (weights @ v).transpose(0, 1).to(query.dtype)
    return out


class _Wrapper:
    attend: Attend = staticmethod(documented)

    def __init__(self, workspace: Tensor, kv_layout: str = "NHD") -> None:
        assert kv_layout == "NHD"
        assert workspace.dtype is torch.uint8
        self._planned: Planned | None = None
        self.plans = 0

    def _plan(self, *arguments: object) -> None:
        self._planned = Planned(*arguments)
        assert all(tensor.dtype is torch.int32 for tensor in arguments if isinstance(tensor, Tensor))
        assert self._planned.last_tokens.min() >= 1
        assert self._planned.last_tokens.max() <= self._planned.page_size
        self.plans += 1

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        plan = self._planned
        assert plan is not None
        assert q.is_contiguous()
        assert (q.shape[1], *paged_kv_cache[0].shape[2:]) == plan.heads
        assert q.shape[0] == plan.query_starts[-1]
        assert (q.dtype, paged_kv_cache[0].dtype) == plan.types
        return self.attend(plan, q, *paged_kv_cache)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    """For any number of queries in each sequence."""

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
    ) -> None:
        assert causal
        heads = (num_qo_heads, num_kv_heads, head_dim_qk)
        held = (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        scale = head_dim_qk**-0.5 if sm_scale is None else sm_scale
        self._plan(qo_indptr, *held, heads, page_size, scale, window_left, (q_data_type, kv_data_type or q_data_type))


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    """For one query in each sequence."""

    def __init__(self, workspace: Tensor, kv_layout: str = "NHD", *, use_tensor_cores: bool = False) -> None:
        super().__init__(workspace, kv_layout)
        assert use_tensor_cores, "without there are kernels for few ratios of heads"

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        sm_scale: float | None = None,
        window_left: int = -1,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
    ) -> None:
        heads = (num_qo_heads, num_kv_heads, head_dim)
        scale = head_dim**-0.5 if sm_scale is None else sm_scale
        starts = torch.arange(len(last_page_len) + 1, dtype=torch.int32)
        types = (q_data_type, kv_data_type or q_data_type)
        self._plan(starts, indptr, indices, last_page_len, heads, page_size, scale, window_left, types)
