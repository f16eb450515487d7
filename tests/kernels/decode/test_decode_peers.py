"""flash_attn_with_kvcache, FlashInfer and FlashMLA, against stand-ins for libraries of GPUs.

Each stand-in has the signature that the libraries document, checks layouts as they do and
computes by definition. What this cannot tell is whether the libraries compute the right thing;
on a GPU test_decoding does.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from decoding import Step, backend_of, problem_of, rotated
from torch import Tensor

from kernels.backends import flash_mla, flashinfer
from kernels.libraries import flash_kvcache as _flash_kvcache
from kernels.rotary import Rotary

LENGTHS = [0, 1, 4, 7]


def attend(q_THD: Tensor, k_KGD: Tensor, v_KGE: Tensor, scale: float) -> Tensor:
    """One sequence, its last T keys the new tokens' own."""
    group = q_THD.shape[1] // k_KGD.shape[1]
    k, v = (x.repeat_interleave(group, 1).double() for x in (k_KGD, v_KGE))
    scores = torch.einsum("thd,khd->htk", q_THD.double(), k) * scale
    new, keys = scores.shape[1:]
    hidden = torch.arange(keys) > torch.arange(keys - new, keys)[:, None]
    p = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("htk,khe->the", p, v).to(q_THD.dtype)


class Library:
    """flash_attn_with_kvcache over caches [B, S, G, D], or pages [blocks, size, G, D]."""

    def __init__(self) -> None:
        self.given: dict[str, Any] = {}

    def run(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor | None, **given: Any
    ) -> Tensor:
        self.given = given
        assert given["causal"] is True
        assert given["cache_seqlens"].dtype == torch.int32
        assert all(x.stride(-1) == 1 for x in (q, k_cache, v_cache, given["k"], given["v"]))
        size = k_cache.shape[1]
        capacity = size if table is None else size * table.shape[1]
        cos, sin = given["rotary_cos"], given["rotary_sin"]
        rotary = None
        if cos is not None:
            assert cos.dtype == sin.dtype == q.dtype
            assert cos.is_contiguous()
            assert len(cos) >= capacity
            rotary = Rotary(cos, sin, given["rotary_interleaved"])
        found = []
        for index, length in enumerate(given["cache_seqlens"].tolist()):
            positions = torch.arange(length, length + q.shape[1])
            turn = [
                rotated(x[index].transpose(0, 1), positions, rotary).transpose(0, 1).to(x.dtype)
                for x in (q, given["k"])
            ]
            for place, position in enumerate(positions.tolist()):
                row, column = index, position
                if table is not None:
                    row, column = int(table[index, position // size]), position % size
                k_cache[row, column] = turn[1][place]
                v_cache[row, column] = given["v"][index, place]
            seen = length + q.shape[1]
            k, v = (
                x[index, :seen] if table is None else x[table[index].long()].flatten(0, 1)[:seen]
                for x in (k_cache, v_cache)
            )
            found.append(attend(turn[0], k, v, given["softmax_scale"]))
        return torch.stack(found)


def with_kvcache(library: Library, table: str, *, gives_lse: bool) -> Callable[..., Any]:
    """flash_attn_with_kvcache with the parameters that are used, its table named ``table``."""

    def flash_attn_with_kvcache(**given: Any) -> Any:
        o = library.run(table=given.pop(table), **given)
        return (o, None) if gives_lse else o

    kind = inspect.Parameter.KEYWORD_ONLY
    names = (*_flash_kvcache.NEEDED, table)
    items = [inspect.Parameter(name, kind) for name in names]
    flash_attn_with_kvcache.__signature__ = inspect.Signature(items)  # type: ignore[attr-defined]
    return flash_attn_with_kvcache


def version_2(library: Library) -> Callable[..., Any]:
    return with_kvcache(library, "block_table", gives_lse=False)


def version_3(library: Library) -> Callable[..., Any]:
    """Some builds return the log-sum-exp beside the output."""
    return with_kvcache(library, "page_table", gives_lse=True)


VERSIONS = {
    "flash_attn_2": ("flash_attn.flash_attn_interface", version_2),
    "flash_attn_3": ("flash_attn_3.flash_attn_interface", version_3),
}


def install(monkeypatch: pytest.MonkeyPatch, path: str, **contents: Any) -> ModuleType:
    """A module and the packages that it lies in."""
    parts = path.split(".")
    for end in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(parts[end - 1]))
    module = ModuleType(path)
    vars(module).update(contents)
    monkeypatch.setitem(sys.modules, path, module)
    return module


class TestFlashAttention:
    @pytest.mark.parametrize("name", VERSIONS)
    @pytest.mark.parametrize("block_size", [None, 4])
    @pytest.mark.parametrize("new_tokens", [1, 2])
    @pytest.mark.parametrize("rotary", ["interleaved", "halves", "none"])
    def test_arguments(
        self,
        name: str,
        block_size: int | None,
        new_tokens: int,
        rotary: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        library, (path, make) = Library(), VERSIONS[name]
        install(monkeypatch, path, flash_attn_with_kvcache=make(library))
        step = Step(lengths=LENGTHS, block_size=block_size, new_tokens=new_tokens, rotary=rotary)
        step.check(backend_of(name))
        assert library.given["softmax_scale"] == step.scale

    @pytest.mark.parametrize(
        ("name", "capability"), [("flash_attn_2", (8, 0)), ("flash_attn_3", (9, 0))]
    )
    def test_who_can_take_it(
        self, name: str, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        backend, (path, make) = backend_of(name), VERSIONS[name]
        missing = backend.supports_decode(problem_of())
        assert missing is not None
        assert "is not installed: " in missing
        monkeypatch.setattr(f"kernels.backends.{name}.capability", lambda: capability)
        install(monkeypatch, path, flash_attn_with_kvcache=make(Library()))
        assert backend.supports_decode(problem_of()) is None
        paged = backend.supports_decode(problem_of(block_size=64))
        assert (paged is None) == (name == "flash_attn_3")
        assert backend.supports_decode(problem_of(block_size=512)) is None
        monkeypatch.setattr(f"kernels.backends.{name}.capability", lambda: (7, 5))
        assert "needs compute capability" in (backend.supports_decode(problem_of()) or "")

    def test_an_older_version_says_what_it_lacks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, cache_seqlens, softmax_scale, causal
        ):  # type: ignore[no-untyped-def]
            raise AssertionError

        path, _ = VERSIONS["flash_attn_2"]
        module = install(monkeypatch, path, flash_attn_with_kvcache=flash_attn_with_kvcache)
        reason = backend_of("flash_attn_2").supports_decode(problem_of())
        assert reason is not None
        assert "its flash_attn_with_kvcache takes no rotary_cos" in reason
        del module.flash_attn_with_kvcache  # type: ignore[attr-defined]
        reason = backend_of("flash_attn_2").supports_decode(problem_of())
        assert "has no flash_attn_with_kvcache" in (reason or "")

    def test_hopper_builds_are_found_in_the_order_of_megatron(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        older = install(monkeypatch, "flashattn_hopper.flash_attn_interface")
        assert backend_of("flash_attn_3").load() is older  # type: ignore[attr-defined]
        newer = install(monkeypatch, "flash_attn_3.flash_attn_interface")
        assert backend_of("flash_attn_3").load() is newer  # type: ignore[attr-defined]

    def test_tables_are_converted_once(self) -> None:
        step = Step(lengths=[3], dtype="bfloat16")
        module = ModuleType("library")
        module.flash_attn_with_kvcache = version_2(Library())  # type: ignore[attr-defined]
        decoder = _flash_kvcache.KvCacheDecoder(
            module, step.cache, rotary=step.table, scale=step.scale
        )
        first = decoder._rotary_arguments(torch.bfloat16)
        assert first["rotary_cos"].dtype == torch.bfloat16
        assert decoder._rotary_arguments(torch.bfloat16) is first


class Wrapper:
    """FlashInfer's BatchDecodeWithPagedKVCacheWrapper, for pages in its layout HND."""

    def __init__(
        self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", use_tensor_cores: bool = False
    ) -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert kv_layout == "HND"

    def plan(
        self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
        pos_encoding_mode="NONE", window_left=-1, logits_soft_cap=None, q_data_type="float16",
        kv_data_type=None, data_type=None, sm_scale=None,
    ) -> None:  # type: ignore[no-untyped-def]  # fmt: skip
        assert pos_encoding_mode == "NONE"
        assert (last_page_len >= 1).all()
        assert (last_page_len <= page_size).all()
        self.planned = (indptr.tolist(), indices, last_page_len.tolist(), page_size, sm_scale)

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        starts, indices, last, size, scale = self.planned
        found = []
        for index, row in enumerate(q):
            blocks = indices[starts[index] : starts[index + 1]].long()
            seen = (len(blocks) - 1) * size + last[index]
            k, v = (x[blocks].transpose(1, 2).flatten(0, 1)[:seen] for x in paged_kv_cache)
            found.append(attend(row[None], k, v, scale)[0])
        return torch.stack(found)


def append_paged_kv_cache(
    append_key, append_value, batch_indices, positions, paged_kv_cache, kv_indices, kv_indptr,
    kv_last_page_len, kv_layout="NHD",
) -> None:  # type: ignore[no-untyped-def]  # fmt: skip
    assert kv_layout == "HND"
    keys, values = paged_kv_cache
    size = keys.shape[2]
    for token, (index, position) in enumerate(
        zip(batch_indices.tolist(), positions.tolist(), strict=True)
    ):
        block = int(kv_indices[int(kv_indptr[index]) + position // size])
        keys[block, :, position % size] = append_key[token]
        values[block, :, position % size] = append_value[token]


def apply_rope_with_cos_sin_cache(
    positions: Tensor, query: Tensor, key: Tensor, head_size: int, cos_sin_cache: Tensor,
    is_neox: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    cos, sin = cos_sin_cache.chunk(2, dim=-1)
    table = Rotary(cos, sin, not is_neox)

    def turned(x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (-1, head_size)).transpose(0, 1)
        return rotated(heads, positions.long(), table).transpose(0, 1).flatten(1).to(x.dtype)

    return turned(query), turned(key)


@pytest.fixture
def flashinfer_here(monkeypatch: pytest.MonkeyPatch) -> None:
    rope = SimpleNamespace(apply_rope_with_cos_sin_cache=apply_rope_with_cos_sin_cache)
    install(
        monkeypatch,
        "flashinfer",
        BatchDecodeWithPagedKVCacheWrapper=Wrapper,
        append_paged_kv_cache=append_paged_kv_cache,
        rope=rope,
    )


class TestFlashInfer:
    @pytest.mark.parametrize("block_size", [1, 4])
    @pytest.mark.parametrize("rotary", ["interleaved", "halves", "none"])
    def test_arguments(self, block_size: int, rotary: str, flashinfer_here: None) -> None:
        step = Step(lengths=LENGTHS, block_size=block_size, rotary=rotary)
        step.check(backend_of("flashinfer"))

    def test_a_later_step_is_planned_anew(self, flashinfer_here: None) -> None:
        step = Step(lengths=LENGTHS, block_size=4)
        decoder = step.decoder(backend_of("flashinfer"))
        for _ in range(4):
            step.cache.places.reserve(1)
            expected, _ = step.expected()
            decoder.plan()
            decoder.begin()
            o = decoder(1, *step.inputs)
            torch.testing.assert_close(o.double(), expected, rtol=1e-5, atol=1e-5)
            step.cache.places.advance(1)
            step.lengths = step.cache.places.host_lengths

    def test_not_installed(self) -> None:
        flashinfer.why_not_installed.cache_clear()
        reason = backend_of("flashinfer").supports_decode(problem_of(block_size=16))
        assert reason == f"flashinfer is not installed: {flashinfer.INSTALL}"


def get_mla_metadata(cache_seqlens, num_heads_per_head_k, num_heads_k):  # type: ignore[no-untyped-def]
    assert cache_seqlens.dtype == torch.int32
    assert num_heads_k == 1
    return cache_seqlens.clone(), num_heads_per_head_k


def flash_mla_with_kvcache(
    q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits,
    softmax_scale=None, causal=False,
):  # type: ignore[no-untyped-def]  # fmt: skip
    assert torch.equal(tile_scheduler_metadata, cache_seqlens)
    assert num_splits == q.shape[1] * q.shape[2]
    assert k_cache.shape[2] == 1
    assert causal
    found = []
    for index, seen in enumerate(cache_seqlens.tolist()):
        rows = k_cache[block_table[index].long()].flatten(0, 1)[:seen]
        found.append(attend(q[index], rows, rows[..., :head_dim_v], softmax_scale))
    return torch.stack(found), None


class TestFlashMla:
    @pytest.mark.parametrize("new_tokens", [1, 2])
    def test_arguments(self, new_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
        install(
            monkeypatch,
            "flash_mla",
            get_mla_metadata=get_mla_metadata,
            flash_mla_with_kvcache=flash_mla_with_kvcache,
        )
        step = Step(
            lengths=LENGTHS, new_tokens=new_tokens, block_size=4, kv_lora_rank=16, rope_head_dim=4
        )
        step.check(backend_of("flash_mla"), tolerance=1e-4)

    def test_who_can_take_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        sizes = {"kv_lora_rank": 512, "rope_head_dim": 64, "block_size": 64, "num_kv_heads": 1}
        backend, problem = backend_of("flash_mla"), problem_of(**sizes)
        assert "needs compute capability 9.0" in (backend.supports_decode(problem) or "")
        monkeypatch.setattr("kernels.backends.flash_mla.capability", lambda: (9, 0))
        flash_mla.why_not_installed.cache_clear()
        assert "flash_mla is not installed" in (backend.supports_decode(problem) or "")
