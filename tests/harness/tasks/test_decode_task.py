"""The tasks that decode, prefill and count: formulas by hand, checks that bite, words of errors."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from profiles import SHORT, case_of, run
from roofs import shrink_roofs
from torch import Tensor

from harness.analysis.frame import build_frame
from harness.bench.outcome import WrongResult
from harness.cases.case import Case
from harness.reports.decoding.fusion_breakdown_figure import COLOURS
from harness.reports.decoding.fusion_rows import PARTS
from harness.request.compose import compose_request
from harness.request.plan import predicted_seconds
from harness.run.workers.worker import why_unsupported
from harness.tasks.decoding import decode_check
from harness.tasks.decoding.decode_call import DecodeCall
from harness.tasks.decoding.prefill_call import PrefillCall
from harness.tasks.lengths import ragged_cache_lengths
from kernels.decode.steps.operators import MatmulDecoder
from kernels.rotary import Rotary

DECODE = ("task=decode", "attention=standard", *SHORT)

SMALL = (*DECODE, "task.num_heads=4", "task.num_kv_heads=2", "task.head_dim=8", "batch_size=3")

LATENT = (
    *("task=decode", "cache=latent", "task.num_heads=2", "task.head_dim=6", "batch_size=2"),
    *("task.kv_lora_rank=8", "task.rope_head_dim=4", "seq_len=5", *SHORT),
)

OLD_ID = "train_step-train_step-tiny-naive-fp32-b4-s64-cpu-4756de7e2a"
"""The id of this case in records from before task=decode."""


@pytest.fixture(autouse=True)
def small_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink_roofs(monkeypatch)


class TestFormulas:
    def test_bytes_and_flops_of_keys_and_values(self) -> None:
        case = case_of(*SMALL, "seq_len=10", "task.new_tokens=2", "task.num_layers=3")
        work = case.task.work(case)["decode"]
        # Per sequence and layer: 10 tokens read, 2 new ones read and written, 2 x 2 heads of 8
        # each; q and o of 2 tokens and 4 heads; 4 bytes a number.
        elements = 2 * 2 * 8 * (10 + 4) + 2 * 2 * 4 * 8
        assert work.bytes == 3 * 3 * 4 * elements
        # The new tokens see 11 and 12 tokens: two matmuls of 2 FLOPs over 4 heads of 8.
        assert work.flops == 3 * 3 * 4 * 4 * 8 * (11 + 12)
        assert work.tokens == 6

    def test_bytes_and_flops_of_latents(self) -> None:
        case = case_of(*LATENT, "attention=mla_absorbed")
        work = case.task.work(case)["decode"]
        weights = 2 * 2 * 6 * 8
        elements = 2 * 12 * (5 + 2) + 2 * 2 * (6 + 4 + 6) + weights
        assert work.bytes == 4 * elements
        # Scores over 12 numbers and values over 8, of 2 heads and 6 tokens; W_k and W_v once.
        assert work.flops == 2 * (2 * 2 * 6 * (12 + 8) + 2 * weights)

    def test_ragged_lengths_have_the_mean(self) -> None:
        lengths = ragged_cache_lengths(16, 100, seed=3)
        assert sum(lengths) == 1600
        assert len(set(lengths)) > 10
        assert min(lengths) < 60 < 140 < max(lengths)
        assert lengths == ragged_cache_lengths(16, 100, seed=3) != ragged_cache_lengths(16, 100, 4)
        ragged, equal = (
            case_of(*SMALL, "seq_len=64", f"task.lengths={kind}") for kind in ("ragged", "equal")
        )
        assert ragged.task.work(ragged)["decode"] == equal.task.work(equal)["decode"]

    @pytest.mark.parametrize("cache", ["contiguous", "paged", "latent"])
    def test_predicted_memory_holds_the_cache(self, cache: str) -> None:
        keys = LATENT if cache == "latent" else (*SMALL, "task.lengths=ragged", f"cache={cache}")
        attention = "mla_absorbed" if cache == "latent" else "standard"
        keys = tuple(key for key in keys if not key.startswith("attention="))
        case = case_of(*keys, f"attention={attention}")
        assert case.cache is not None
        held = case.cache.allocate(case.task.cache_shape(case), "cpu")  # type: ignore[attr-defined]
        assert case.task.predicted_memory(case)["cache"] == held.storage_bytes

    def test_long_caches_are_predicted_to_take_longer(self) -> None:
        """They are read, however little is computed."""
        keys = ("task=decode", "task.num_heads=32", "batch_size=16")
        short, long = (case_of(*keys, f"seq_len={length}") for length in (128, 131072))
        assert predicted_seconds(long) > predicted_seconds(short) + 10


class TestDecode:
    @pytest.mark.parametrize(
        "keys",
        [
            (*SMALL, "seq_len=9", "task.lengths=ragged", "task.new_tokens=2"),
            (*SMALL, "seq_len=9", "cache=paged", "cache.block_size=4", "task.num_layers=2"),
            (*SMALL, "seq_len=9", "precision=bf16", "task.rotary=halves"),
            (*LATENT, "attention=mla_materialised", "cache.block_size=4"),
            (*LATENT, "attention=mla_absorbed", "cache.block_size=null"),
        ],
    )
    def test_it_runs_and_checks_itself(self, keys: tuple[str, ...], tmp_path: Path) -> None:
        case = case_of(*keys)
        record = run(case, tmp_path)
        assert set(record.phases) == {"decode"} == set(record.work)
        assert record.notes["decode"]["copy_bandwidth_gb_s"] > 0
        assert record.notes["decode"]["matmul_tflops"] > 0
        assert record.notes["decode"]["kernels"] > 5
        (row,) = build_frame([record]).to_dict("records")
        assert row["cache"] == (case.cache.label if case.cache else None)
        assert row["layers"] == (2 if "task.num_layers=2" in keys else 1)

    def test_a_mixed_batch(self, tmp_path: Path) -> None:
        case = case_of(*SMALL, "task.prompts=2", "task.prompt_len=6", "cache=paged")
        record = run(case, tmp_path)
        assert set(record.phases) == {"prefill", "decode", "step"} == set(record.work)
        assert record.work["prefill"]["tokens"] == 12
        for prefill, decode, step in zip(
            *(record.phases[name].samples_ms[0] for name in ("prefill", "decode", "step")),
            strict=True,
        ):
            assert step >= prefill + decode
        assert "prompts2x6" in case.slug

    def test_lengths_stand_still(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        made: list[DecodeCall] = []
        monkeypatch.setattr(DecodeCall, "plan", lambda self: made.append(self))
        case = case_of(*SMALL, "seq_len=7", "task.lengths=ragged")
        run(case, tmp_path)
        lengths = ragged_cache_lengths(3, 7, case.seed)
        assert made[0].cache.places.lengths.tolist() == lengths

    @pytest.mark.parametrize(
        ("fault", "words"),
        [
            ("scores", "relative error of o "),
            ("keys", "relative error of appended_k"),
            ("history", "changed a row of the cache"),
        ],
    )
    def test_a_wrong_step_is_no_speed(
        self, fault: str, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        true = MatmulDecoder.__call__

        def wrong(self: MatmulDecoder, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            o = true(self, layer, q, k, v)
            if fault == "scores":
                return o * 1.01
            if fault == "keys":
                first, second = self.tokens.slots
                self.cache.keys[layer][first, :, second] *= 1.01
            else:
                self.cache.values[layer][-1, :, 0] += 1.0
            return o

        monkeypatch.setattr(MatmulDecoder, "__call__", wrong)
        with pytest.raises(WrongResult, match=words):
            run(case_of(*SMALL, "seq_len=9"), tmp_path)

    def test_a_wrong_rotation_is_found(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        true = decode_check.apply_rotary

        def other(x: Tensor, table: Rotary, positions: Tensor) -> Tensor:
            return true(x, Rotary(table.cos, table.sin, not table.interleaved), positions)

        monkeypatch.setattr(decode_check, "apply_rotary", other)
        with pytest.raises(WrongResult):
            run(case_of(*SMALL, "seq_len=9"), tmp_path)

    def test_profiled_parts(self, tmp_path: Path) -> None:
        record = run(case_of(*SMALL, "profile=torch"), tmp_path)
        rows = record.notes["kernel_profile"]["rows"]
        found = {row["range"].split("/")[0] for row in rows if row["phase"] == "decode"}
        assert {"positions", "rotary_q", "rotary_k", "append", "attention"} <= found

    def test_profiled_parts_of_the_latent_kernels(self, tmp_path: Path) -> None:
        """None that the kernels make superfluous, and each one that the breakdown can draw."""
        keys = ("attention=mla_absorbed", "attention.implementation=triton", "profile=torch")
        case = case_of(*LATENT, *keys)
        reason = why_unsupported(case)
        if reason is not None:
            pytest.skip(reason)
        rows = run(case, tmp_path).notes["kernel_profile"]["rows"]
        found = {row["range"].split("/")[0] for row in rows if row["phase"] == "decode"}
        assert found - {""} == {"rotary_append", "absorb_q", "attention", "absorb_v"}
        assert found - {""} <= set(PARTS) <= set(COLOURS)

    def test_graphs_need_a_gpu(self) -> None:
        case = case_of(*SMALL, "task.cuda_graph=true")
        assert why_unsupported(case) == "CUDA graphs exist on CUDA devices only"

    def test_what_auto_chose_is_said(self) -> None:
        case = case_of(*SMALL[:1], "attention=auto")
        assert case.task.attention_choice(case) == "sdpa"


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (["task.new_tokens=0"], "task.new_tokens=0: must be at least 1"),
        (["task.lengths=long"], "task.lengths=long: must be one of equal, ragged"),
        (["task.rotary=left"], "task.rotary=left: must be one of"),
        (["task.num_heads=4", "task.num_kv_heads=3"], "task.num_kv_heads=3: must divide"),
        (["task.head_dim=7"], "task.head_dim=7: rotary embedding"),
        (["task.lengths=ragged", "batch_size=1"], "task.lengths=ragged: needs batch_size=2"),
        (["cache=latent", "task.num_kv_heads=2"], "task.num_kv_heads=2: cache=latent keeps one"),
        (["cache=latent", "task.rope_head_dim=3"], "task.rope_head_dim=3: rotary embedding"),
        (["cache=latent", "task.prompts=1"], "task.prompts=1: prompts are prefilled into keys"),
        (["task.prompts=1", "task.cuda_graph=true"], "task.cuda_graph=true: a graph"),
        (
            ["cache=latent", "cache.block_size=32", "attention=flash_mla"],
            "cache.block_size=32: attention=flash_mla",
        ),
        (
            ["cache=latent", "cache.block_size=null", "attention=flash_mla"],
            "cache.block_size=null: attention=flash_mla",
        ),
        (
            ["cache=paged", "cache.num_blocks=3", "seq_len=64", "batch_size=2"],
            "cache.num_blocks=3: the batch needs 4",
        ),
        (["cache=paged", "cache.block_size=0"], "cache.block_size=0: must be at least 1"),
        (["cache=page"], "cache=page: no such choice (did you mean paged?); there are"),
        (["parallel=ddp_torch"], "parallel.dp=2: task=decode runs in one process"),
        (["task.prefill_attention=fast"], "task.prefill_attention=fast: must be one of"),
        (["attention=mla_absorbed", "attention.implementation=c"], "attention.implementation=c"),
        (["attention=flash_decode", "attention.num_splits=0"], "attention.num_splits=0: must be"),
        (["task=prefill", "cache=latent"], "cache=latent: prompts are prefilled into keys"),
        (["task=prefill", "batch_size=1"], "task.packing=ragged: needs batch_size=2"),
        (["task=kv_memory", "task.shape=gpt"], "task.shape=gpt: must be one of llama3_8b"),
        (["task=kv_memory", "task.device_gib=0"], "task.device_gib=0: must be positive"),
        (["task=train_step", "cache=paged"], "cache: "),
        (["task=train_step", "model.kv_lora_rank=8"], "model.kv_lora_rank=8: task=train_step"),
    ],
)
def test_words_for_what_makes_no_sense(keys: list[str], words: str) -> None:
    given = [] if any(key.startswith("task=") for key in keys) else ["task=decode"]
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        compose_request([*given, *keys, "device=cpu"])
    assert "\n" not in str(caught.value)


class TestPrefill:
    @pytest.mark.parametrize("packing", ["equal", "ragged", "padded"])
    def test_it_runs_and_checks_itself(self, packing: str, tmp_path: Path) -> None:
        keys = ("task=prefill", "task.num_heads=4", "task.num_kv_heads=2", "task.head_dim=8")
        case = case_of(
            *keys, *SHORT, "attention=naive", f"task.packing={packing}", "seq_len=12",
            "batch_size=3", "cache=paged", "cache.block_size=8",
        )  # fmt: skip
        record = run(case, tmp_path)
        assert set(record.phases) == {"prefill", "attention"} == set(record.work)
        # By the real lengths: as many tokens whether padded or not.
        assert record.work["prefill"]["tokens"] == 36

    def test_padding_does_no_work(self) -> None:
        padded, ragged = (
            case_of("task=prefill", "seq_len=100", "batch_size=8", f"task.packing={packing}")
            for packing in ("padded", "ragged")
        )
        assert padded.task.work(padded) == ragged.task.work(ragged)
        memory = [sum(case.task.predicted_memory(case).values()) for case in (padded, ragged)]
        assert memory[0] > 1.3 * memory[1]

    def test_a_cache_that_misses_a_prompt_is_found(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        true = PrefillCall.step

        def wrong(self: PrefillCall, *phases: Any) -> Tensor:
            o = true(self, *phases)
            self.cache.keys[-1].zero_()
            return o

        monkeypatch.setattr(PrefillCall, "step", wrong)
        keys = ("task=prefill", "attention=naive", "seq_len=8", "batch_size=2", *SHORT)
        with pytest.raises(WrongResult, match="the cache does not hold what prompt"):
            run(case_of(*keys), tmp_path)


class TestKvMemory:
    def case(self, *keys: str) -> Case:
        length = () if any(key.startswith("seq_len=") for key in keys) else ("seq_len=4096",)
        return case_of("task=kv_memory", "precision=bf16_pure", "batch_size=2", *length, *keys)

    def test_limits_by_hand(self, tmp_path: Path) -> None:
        # 2 x 32 layers x 8 heads x 128 x 2 bytes are 128 KiB a token, 0.5 GiB for 4,096.
        record = run(self.case("task.device_gib=1.2"), tmp_path)
        found = record.notes["kv_memory"]
        assert found["bytes_per_token"] == 128 * 1024
        assert found["total_bytes"] == found["allocated_bytes"] == 2**30
        assert found["fits"] is True
        assert found["largest_batch"] == 2
        assert found["longest_len"] == int(1.2 * 4096)
        assert not run(self.case("task.device_gib=0.9"), tmp_path).notes["kv_memory"]["fits"]

    def test_work_of_a_step_over_it(self) -> None:
        # 2 x 4,096 tokens, 32 heads in 32 layers: a score and a value of 128 numbers each.
        keys = self.case()
        assert keys.task.work(keys)["step"].flops == 2 * 4096 * 32 * 32 * 2 * (128 + 128)
        latent = self.case("task.attention_type=mla")
        pairs = 2 * 4096 * 32 * 32
        assert latent.task.work(latent)["step"].flops == pairs * 2 * (512 + 64 + 512)

    def test_a_block_is_taken_whole(self, tmp_path: Path) -> None:
        record = run(self.case("seq_len=65", "task.block_size=64"), tmp_path)
        assert record.notes["kv_memory"]["total_bytes"] == 2 * 128 * 128 * 1024

    def test_a_formula_that_is_off_is_found(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        from kernels.caches.contiguous import Contiguous

        monkeypatch.setattr(Contiguous, "storage_bytes", lambda self, shape: 17)
        with pytest.raises(
            WrongResult, match="the formula gives 17 bytes, and the cache allocates"
        ):
            run(self.case(), tmp_path)


def test_a_case_survives_its_json_and_old_ids_stand() -> None:
    case = case_of("task=decode", "cache=paged", "cache.block_size=16")
    assert Case.from_dict(case.to_dict()) == case
    other = replace(case, cache=replace(case.cache, block_size=32))  # type: ignore[type-var]
    assert other.id != case.id
    assert "paged16" in case.slug
    # A training step without options of decoding has the id that it had before there were any.
    defaults = ("model=tiny", "attention=naive", "seq_len=64")
    assert case_of(*defaults).id == OLD_ID
