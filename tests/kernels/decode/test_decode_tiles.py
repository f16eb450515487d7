"""The tile sizes of the decode kernels: rules, and the tables of a device that go before them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from triton_device import CLOSENESS, RUNS_TRITON

pytestmark = RUNS_TRITON


class TestTiles:
    @pytest.fixture(autouse=True)
    def own_folder(self, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        from kernels.decode import configs

        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr(configs, "device_facts", lambda device: ("Some GPU", 10, 99 * 1024))
        configs._users.cache_clear()

    def call(self, head_dim: int = 128, dtype: torch.dtype = torch.bfloat16, heads: int = 4) -> Any:
        from kernels.decode.call import Call

        return Call(
            device=torch.device("cpu"), dtype=dtype, batch_size=1, num_heads=heads, num_kv_heads=1,
            new=1, head_dim=head_dim, capacity=64, page=0, rope_dim=64,
        )  # fmt: skip

    def test_the_users_table_wins(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import json
        from dataclasses import asdict

        from kernels.decode import configs

        row = configs.shape_class("flash", self.call())
        assert row == "flash/16bit/d128/rows16"
        rule = configs.choose("flash", self.call(), interpreted=False)
        assert rule == configs.flash_rule(self.call(), 99 * 1024)
        pinned, mine = (
            configs.Tiles(block_m=16, block_n=n, num_warps=4, num_stages=2, programs_per_sm=3)
            for n in (32, 256)
        )
        monkeypatch.setattr(configs, "_pinned", lambda: {"Some GPU": {row: pinned}})
        assert configs.choose("flash", self.call(), interpreted=False) == pinned
        path = configs.user_table_path("Some GPU")
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({row: asdict(mine)}), encoding="utf-8")
        configs._users.cache_clear()
        assert configs.choose("flash", self.call(), interpreted=False) == mine
        path.write_text("{", encoding="utf-8")
        configs._users.cache_clear()
        with pytest.warns(UserWarning, match="ignored, not a table"):
            assert configs.choose("flash", self.call(), interpreted=False) == pinned

    @pytest.mark.parametrize("shared_memory_kib", [64, 99, 163, 227])
    def test_rules_fit(self, shared_memory_kib: int) -> None:
        from kernels.decode import configs

        for dtype in CLOSENESS:
            for head_dim in (16, 64, 128, 256):
                for heads in (1, 16, 128):
                    call = self.call(head_dim, dtype, heads)
                    tiles = configs.flash_rule(call, shared_memory_kib * 1024)
                    row_bytes = head_dim * dtype.itemsize
                    buffers = max(1, tiles.num_stages - 1)
                    held = (tiles.block_m + 2 * buffers * tiles.block_n) * row_bytes
                    assert held <= shared_memory_kib * 1024
            for heads in (1, 16, 128):
                call = self.call(512, dtype, heads)
                tiles = configs.latent_rule(call, shared_memory_kib * 1024)
                width = (512 + 64) * dtype.itemsize
                buffers = max(1, tiles.num_stages - 1)
                held = (tiles.block_m + buffers * tiles.block_n) * width
                assert held <= shared_memory_kib * 1024 or tiles.block_n == 16

    def test_shipped_table(self) -> None:
        from kernels.decode import configs

        rows = configs._pinned()["NVIDIA H200"]
        known = {
            configs.shape_class(kernel, self.call(head_dim, heads=heads))
            for kernel, head_dim, heads in (
                ("flash", 64, 4), ("flash", 128, 4), ("flash", 256, 4), ("latent", 512, 128),
            )
        }  # fmt: skip
        assert set(rows) == known
