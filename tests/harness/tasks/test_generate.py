"""The task generate: phases, work by hand, and the check of its logits."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from profiles import case_of, run
from roofs import shrink_roofs

from harness.bench.outcome import WrongResult
from harness.run.workers.worker import why_unsupported
from models.generation import Generator


class TestTask:
    @pytest.fixture(autouse=True)
    def small_copies(self, monkeypatch: pytest.MonkeyPatch) -> None:
        shrink_roofs(monkeypatch)

    KEYS = (
        *("task=generate", "model=tiny", "model.num_layers=1", "seq_len=6", "batch_size=2"),
        *("task.output_len=4", "task.warmup_steps=1", "task.measure_steps=2"),
    )

    @pytest.mark.parametrize(
        "keys",
        [
            ("attention=standard", "cache=paged", "cache.block_size=4"),
            ("attention=sdpa", "task.lengths=ragged", "precision=bf16"),
            ("attention=mla_absorbed", "cache=latent", "model.kv_lora_rank=16"),
        ],
    )
    def test_it_runs_and_checks_itself(self, keys: tuple[str, ...], tmp_path: Path) -> None:
        record = run(case_of(*self.KEYS, *keys), tmp_path)
        assert set(record.phases) == {"prefill", "decode"} == set(record.work)
        assert len(record.phases["prefill"].samples_ms[0]) == 2
        assert len(record.phases["decode"].samples_ms[0]) == 2 * 3
        assert record.notes["generate"]["kernels"] > 10

    def test_work_by_hand(self) -> None:
        case = case_of(*self.KEYS, "attention=standard")
        work = case.task.work(case)
        # model=tiny: 128 wide, 384 inside, 1,000 words. One layer's matmuls and the head.
        layer, head = 4 * 128**2 + 3 * 128 * 384, 128 * 1000
        pairs = 2 * 6 * 6 / 2
        assert work["prefill"].flops == 2 * layer * 12 + 2 * head * 2 + 4 * 128 * pairs
        # In the middle of the output each sequence holds 6 + 2 tokens of 2 x 128 numbers.
        assert work["decode"].bytes == 4 * (layer + head) + 2 * 8 * 2 * 128 * 4
        assert work["decode"].flops == 2 * (layer + head) * 2 + 4 * 128 * 16
        assert (work["prefill"].tokens, work["decode"].tokens) == (12, 2)

    def test_another_answer_than_the_models_is_no_speed(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        true = Generator.step
        monkeypatch.setattr(Generator, "step", lambda self, tokens: true(self, tokens).roll(1, -1))
        with pytest.raises(WrongResult, match="relative error of logits against the model"):
            run(case_of(*self.KEYS, "attention=standard"), tmp_path)

    def test_graphs_need_a_gpu(self) -> None:
        case = case_of(*self.KEYS, "task.cuda_graph=true")
        assert why_unsupported(case) == "CUDA graphs exist on CUDA devices only"

    @pytest.mark.parametrize(
        ("keys", "words"),
        [
            (["task.output_len=1"], "task.output_len=1: must be at least 2"),
            (["cache=latent"], "cache=latent: model=tiny keeps keys and values; set model.kv_lora"),
            (["model.kv_lora_rank=8"], "cache=contiguous: model.kv_lora_rank=8 keeps latents"),
            (["cache=paged", "cache.num_blocks=1"], "cache.num_blocks=1: the batch needs 2 blocks"),
            (["task.lengths=ragged", "batch_size=1"], "task.lengths=ragged: needs batch_size=2"),
        ],
    )
    def test_words_for_what_makes_no_sense(self, keys: list[str], words: str) -> None:
        given = [
            key for key in self.KEYS if key.split("=")[0] not in {k.split("=")[0] for k in keys}
        ]
        with pytest.raises(ValueError, match=re.escape(words)):
            case_of(*given, *keys)
