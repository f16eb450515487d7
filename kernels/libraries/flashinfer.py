"""FlashInfer's wrapper over this project's paged cache, whose layout it calls HND."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from kernels.caches.key_values import KeyValueCache
from kernels.caches.places import BlockPlaces
from kernels.decoding import DecodeProblem, Decoder
from kernels.libraries.adapter import call_by_name
from kernels.ranges import named_range
from kernels.rotary import Rotary

WORKSPACE_BYTES = 128 * 2**20
"""Workspace for split keys that FlashInfer's documentation recommends."""


class FlashInferDecoder(Decoder):
    """Planned once a step; rotary, append and attention once a layer."""

    def __init__(
        self, problem: DecodeProblem, cache: KeyValueCache, *, rotary: Rotary | None, scale: float
    ) -> None:
        flashinfer: Any = importlib.import_module("flashinfer")
        assert isinstance(cache.places, BlockPlaces)
        self._library = flashinfer
        self._problem = problem
        self._cache = cache
        self._places = cache.places
        self._scale = scale
        device = cache.places.device
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        group = problem.num_heads // problem.num_kv_heads
        self._wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "HND", use_tensor_cores=group >= 4
        )
        self._is_neox = rotary is not None and not rotary.interleaved
        self._cos_sin = None if rotary is None else torch.cat((rotary.cos, rotary.sin), dim=-1)
        self._sequences = torch.arange(problem.batch_size, dtype=torch.int32, device=device)

    def plan(self) -> None:
        problem, places = self._problem, self._places
        lengths = [length + problem.new_tokens for length in places.host_lengths]
        size = places.block_size
        counts = [-(-length // size) for length in lengths]
        indices = [
            block
            for owned, count in zip(places.blocks, counts, strict=True)
            for block in owned[:count]
        ]
        starts = [0]
        for count in counts:
            starts.append(starts[-1] + count)

        def tensor(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=places.device)

        self._indptr, self._indices = tensor(starts), tensor(indices)
        self._last = tensor([(length - 1) % size + 1 for length in lengths])
        dtype = getattr(torch, problem.dtype)
        # Not the bound method: what call_by_name() remembers of it would keep its workspace alive.
        call_by_name(
            type(self._wrapper).plan,
            self=self._wrapper,
            indptr=self._indptr,
            indices=self._indices,
            last_page_len=self._last,
            num_qo_heads=problem.num_heads,
            num_kv_heads=problem.num_kv_heads,
            head_dim=problem.head_dim,
            page_size=size,
            pos_encoding_mode="NONE",
            # Versions name the dtypes differently; call_by_name() gives those that this one has.
            q_data_type=dtype,
            kv_data_type=dtype,
            data_type=dtype,
            sm_scale=self._scale,
        )

    def __call__(self, layer: int, q: Tensor, k_new: Tensor, v_new: Tensor) -> Tensor:
        problem, positions = self._problem, self._places.lengths
        # One new token a sequence: [B, H, 1, D] is [B, H, D].
        q, k, v = q.squeeze(2), k_new.squeeze(2), v_new.squeeze(2)
        if self._cos_sin is not None:
            with named_range("rotary_qk"):
                q, k = self._library.rope.apply_rope_with_cos_sin_cache(
                    positions,
                    q.reshape(problem.batch_size, -1),
                    k.reshape(problem.batch_size, -1),
                    problem.head_dim,
                    self._cos_sin,
                    self._is_neox,
                )
                q = q.view(problem.batch_size, -1, problem.head_dim)
                k = k.view(problem.batch_size, -1, problem.head_dim)
        paged = (self._cache.keys[layer], self._cache.values[layer])
        with named_range("append"):
            self._library.append_paged_kv_cache(
                k,
                v.contiguous(),
                self._sequences,
                positions,
                paged,
                self._indices,
                self._indptr,
                self._last,
                kv_layout="HND",
            )
        with named_range("attention"):
            return self._wrapper.run(q.contiguous(), paged).unsqueeze(2)
