"""The tile sizes of FlashAttention in Triton: rules, tables of a device, and the search for one."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from exact_attention import assert_close, exact, exact_gradients, inputs
from triton_device import CLOSENESS, DEVICE, RUNS_TRITON

from kernels.backends.flash_triton import FlashTriton
from kernels.flash import flash_attention, operator
from kernels.flash.any_gpu import configs
from kernels.flash.any_gpu import launch as plain
from kernels.flash.call.arguments import FlashCall, FlashOptions
from kernels.flash.call.problem import Problem
from kernels.problem import AttentionSpec

pytestmark = [*RUNS_TRITON, pytest.mark.usefixtures("exact_float32")]


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache folder and a device that no table knows."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(configs, "_device_facts", lambda device: ("Some GPU", 100 * 1024))
    configs._cached.cache_clear()
    yield configs.cache_path("Some GPU")
    configs._cached.cache_clear()


def facts(**changes: Any) -> Any:
    values: dict[str, Any] = {
        "device": torch.device("cpu"), "dtype": torch.bfloat16, "batch_size": 1, "num_heads": 2,
        "num_kv_heads": 2, "q_len": 4096, "kv_len": 4096, "head_dim": 64, "causal": True,
        "packed": False, "accumulates": False, "precision": "ieee",
    }  # fmt: skip
    return Problem(**{**values, **changes})


class TestConfigs:
    ROW = "forward/bfloat16/d64/causal/few"
    SLOW: ClassVar = {"block_q": 16, "block_k": 16, "num_warps": 1, "num_stages": 1}

    def test_rows_are_named_by_what_matters(self) -> None:
        assert configs.shape_class("forward", facts()) == self.ROW
        other = facts(dtype=torch.float32, precision="tf32", head_dim=80, causal=False, q_len=4097,
                      kv_len=2048)  # fmt: skip
        assert configs.shape_class("backward_dq", other) == "backward_dq/tf32/d128/full/some"
        for changes, size in (
            ({"q_len": 4097}, "some"),
            ({"batch_size": 3}, "some"),
            ({"num_heads": 9}, "many"),
        ):
            assert configs.shape_class("forward", facts(**changes)).endswith(f"/{size}")

    def test_order(self, tables: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The shipped table, then the user's, then a search if asked for, then the rule."""

        def measure(config: configs.TileConfig) -> float:
            return 1.0 if config == wanted else 2.0

        wanted = configs.candidates("forward", facts(), 100 * 1024)[2]
        rule = configs.choose("forward", facts(), measure)
        assert rule == configs.candidates("forward", facts(), 100 * 1024)[0] != wanted
        assert configs.choose("forward", facts(autotune=True), measure) == wanted
        assert configs.read_table(tables) == {self.ROW: wanted}
        configs._cached.cache_clear()
        assert configs.choose("forward", facts()) == wanted, "read from the file"
        pinned = configs.TileConfig(**self.SLOW)
        monkeypatch.setattr(
            configs, "_pinned", lambda: {"Some GPU": {"searched": {self.ROW: pinned}}}
        )
        assert configs.choose("forward", facts()) == pinned

    def test_narrower_values_have_tiles_of_their_own(
        self, tables: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Searched for apart; without a search those of values as wide as keys are a guess."""
        narrow = facts(value_dim=24)
        assert configs.shape_class("forward", narrow) == "forward/bfloat16/d64v32/causal/few"
        rule = configs.candidates("forward", facts(), 100 * 1024)[0]
        assert configs.without_search("forward", narrow) == (rule, "rule")
        pinned = configs.TileConfig(**self.SLOW)
        monkeypatch.setattr(
            configs, "_pinned", lambda: {"Some GPU": {"searched": {self.ROW: pinned}}}
        )
        assert configs.without_search("forward", narrow) == (pinned, "predicted")
        searched = facts(value_dim=24, autotune=True)
        found = configs.choose("forward", searched, lambda config: float(config == pinned))
        assert found != pinned
        assert configs.without_search("forward", narrow) == (found, "autotuned")
        assert configs.without_search("forward", facts()) == (pinned, "searched")

    def test_search_skips_what_fails_and_counts_its_time(self, tables: Path) -> None:
        found = configs.candidates("backward_dq", facts(), 100 * 1024)
        before = configs.autotune_seconds()

        def measure(config: configs.TileConfig) -> float:
            time.sleep(0.002)
            if config != found[-1]:
                raise RuntimeError("out of resource: shared memory")
            return 1.0

        assert configs.choose("backward_dq", facts(autotune=True), measure) == found[-1]
        assert configs.autotune_seconds() - before >= 0.002 * len(found)

        def fail(config: configs.TileConfig) -> float:
            raise RuntimeError("out of resource: registers")

        with pytest.raises(RuntimeError, match=r"no tile size works here.*registers"):
            configs.choose("backward_dkv", facts(autotune=True), fail)

    @pytest.mark.parametrize("fails_first", [False, True])
    def test_search_is_bounded_in_time(
        self, tables: Path, monkeypatch: pytest.MonkeyPatch, fails_first: bool
    ) -> None:
        """Candidates of 25 seconds each: three start within a minute, and the best is kept."""
        found = configs.candidates("forward", facts(), 100 * 1024)
        seconds, tried = 0.0, []

        def measure(config: configs.TileConfig) -> float:
            nonlocal seconds
            seconds += 25.0
            tried.append(config)
            if fails_first and len(tried) < 4:
                raise RuntimeError("out of resource: shared memory")
            return 9.0 - len(tried)

        monkeypatch.setattr(configs.time, "perf_counter", lambda: seconds)
        # Those that fail are no answer: the search goes on until one runs.
        count = 4 if fails_first else 3
        wanted = rf"few: autotuning stopped after 60 s, with {len(found) - count} of {len(found)} "
        with pytest.warns(UserWarning, match=wanted) as warned:
            chosen = configs.choose("forward", facts(autotune=True), measure)
        assert len(warned) == 1
        assert tried == found[:count]
        assert chosen == found[count - 1]
        assert configs.read_table(tables) == {self.ROW: chosen}

    def test_records_say_where_tiles_come_from(
        self, tables: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """In every case that runs a problem, not only in the first of its process."""
        monkeypatch.setattr(plain, "_configs", {})
        monkeypatch.setattr(plain, "INTERPRETED", False)
        backend = FlashTriton(name="flash_triton", implementation="plain")
        problem = facts()
        for _ in range(2):
            notes: dict[str, Any] = {}
            with backend.noting(notes):
                plain._config("forward", problem, lambda config: 1.0)
                plain._config("forward", problem, lambda config: 1.0)
            assert notes == {"tiles": "rule"}
        with backend.noting(notes := {}):
            pass
        assert notes == {}

    def test_a_choice_says_where_it_comes_from(
        self, tables: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def origin(**changes: Any) -> str:
            before = configs.origins()
            configs.choose("forward", facts(**changes), lambda config: 1.0)
            (name,) = configs.origins() - before
            return name

        tiles = configs.TileConfig(**self.SLOW)
        assert origin() == "rule"
        pinned = {"predicted": {self.ROW: tiles}}
        monkeypatch.setattr(configs, "_pinned", lambda: {"Some GPU": pinned})
        assert origin() == "predicted"
        assert origin(autotune=True) == "autotuned"
        assert origin() == "autotuned", "measured here goes before predicted"
        pinned["searched"] = {self.ROW: tiles}
        assert origin(autotune=True) == "searched"

    @pytest.mark.parametrize("text", ["{", "[]", '{"row": {"block_q": 1}}', '{"row": 3}', "null"])
    def test_corrupt_file(self, tables: Path, text: str) -> None:
        tables.parent.mkdir(parents=True)
        tables.write_text(text, encoding="utf-8")
        with pytest.warns(UserWarning, match="ignored, not a table"):
            chosen = configs.choose("forward", facts())
        assert chosen == configs.candidates("forward", facts(), 100 * 1024)[0]

    def test_many_writers(self, tables: Path) -> None:
        """A reader sees a whole table at any moment."""
        table = {f"row{i}": configs.TileConfig(**self.SLOW) for i in range(50)}
        writers = [
            threading.Thread(target=lambda: [configs._write(tables, table) for _ in range(20)])
            for _ in range(3)
        ]
        for writer in writers:
            writer.start()
        while any(writer.is_alive() for writer in writers):
            assert configs.read_table(tables) in ({}, table)
        for writer in writers:
            writer.join()
        assert [path.name for path in tables.parent.iterdir()] == [tables.name]

    def test_shipped_table(self) -> None:
        for blocks in configs._pinned().values():
            for row in itertools.chain(*blocks.values()):
                kernel, dtype, head_dim, mask, size = row.split("/")
                assert kernel in configs.INTERPRETER
                assert dtype in ("float32", "bf16x6", "tf32", "float16", "bfloat16")
                assert head_dim in ("d16", "d32", "d64", "d128", "d256")
                assert mask in ("causal", "full")
                assert size in ("few", "some", "many")
        assert configs._pinned()["NVIDIA H200"]

    @pytest.mark.parametrize("kernel", ["forward", "backward_dkv", "backward_dq"])
    @pytest.mark.parametrize("shared_memory_kib", [48, 64, 99, 163, 227])
    def test_every_gpu_has_a_candidate(self, kernel: str, shared_memory_kib: int) -> None:
        for dtype, head_dim in itertools.product(CLOSENESS, (16, 64, 128, 256)):
            problem = facts(dtype=dtype, head_dim=head_dim)
            found = list(configs.candidates(kernel, problem, shared_memory_kib * 1024))
            assert found
            assert min(min(config.block_q, config.block_k) for config in found) >= 16

    def test_autotuning_leaves_the_accumulator_alone(
        self, tables: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        q, k, v, _ = inputs(q_len=20, kv_len=20)
        call = FlashCall(q=q, k=k, v=v, spec=AttentionSpec(causal=True, scale=0.3))
        o, lse = operator.forward(call)
        wanted = operator.forward(call, accumulator=(o.clone(), lse.clone()))
        monkeypatch.setattr(plain, "_configs", {})
        measured = []

        def choose(kernel: str, problem: Any, measure: Any) -> Any:
            measured.append(measure(configs.INTERPRETER[kernel]))
            return configs.INTERPRETER[kernel]

        monkeypatch.setattr(plain, "_config", choose)
        monkeypatch.setattr(plain, "_milliseconds", lambda run: run() or 1.0)
        call = replace(call, options=FlashOptions(autotune=True))
        got = operator.forward(call, accumulator=(o.clone(), lse.clone()))
        assert measured
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device, and torch sees none")
class TestOnCuda:
    @pytest.mark.parametrize("dtype", CLOSENESS, ids=lambda dtype: str(dtype)[6:])
    def test_autotune(self, dtype: torch.dtype, tables: Path) -> None:
        """Every candidate of a kernel runs or drops out, and the winner is right."""
        q, k, v, do = inputs(1, 4, 2, 700, 700, 128, dtype)
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        options = FlashOptions(autotune=True, precision="ieee", implementation="plain")
        o = flash_attention(*leaves, causal=True, options=options)
        found = [o, *torch.autograd.grad(o, leaves, do)]
        scale = 128**-0.5
        expected = [exact(q, k, v, True, scale)[0], *exact_gradients(q, k, v, do, True, scale)]
        for x, z in zip(found, expected, strict=True):
            assert_close(x, z, "result", CLOSENESS[dtype])
        assert len(json.loads(tables.read_text(encoding="utf-8"))) == 3
