"""The precision audit: dtypes written down by hand, sums made by numpy, counts by eye."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from harness.analysis.frame import build_frame
from harness.bench.bench import Bench
from harness.cases.case import Case
from harness.render.table import Table, build_table
from harness.request.compose import compose_request
from harness.run.workers.worker import why_unsupported
from harness.store.record import Record
from harness.tasks.precision.audit import compare

TOY = ("task=precision_audit_toy", "batch_size=4")
TINY = (
    *("task=precision_audit", "model=tiny", "model.num_layers=2", "model.vocab_size=512"),
    *("model.d_model=64", "model.d_ff=192", "seq_len=16", "batch_size=2"),
)


def run(*arguments: str, device: str = "cpu") -> Record:
    (case,) = compose_request([*arguments, f"device={device}"]).cases
    return run_case(case)


def run_case(case: Case) -> Record:
    torch.manual_seed(case.seed)
    bench = Bench(device=torch.device(case.device))
    case.task.run(case, bench)
    notes = bench.outcome.notes
    return Record(case_id=case.id, case=case.to_dict(), status="ok", notes=notes)


def table_of(name: str, *records: Record) -> Table:
    built = build_table(name, build_frame(records))
    assert built is not None
    return built


def column(built: Table, header: str) -> list[str]:
    headers = [item.full_header for item in built.columns]
    return [row[headers.index(header)] for row in built.cells()]


def dtypes(record: Record) -> dict[str, str]:
    built = table_of("precision_dtypes", record)
    return dict(
        zip(column(built, "tensor"), column(built, record.case["precision"]["name"]), strict=True)
    )


def errors(record: Record, kind: str) -> dict[str, float]:
    return {
        tensor["name"]: tensor["error_norm"] / tensor["reference_norm"]
        for tensor in record.notes["audit"]["tensors"]
        if tensor["kind"] == kind and tensor["reference_norm"]
    }


def summed(record: Record, kind: str, count: str) -> int:
    tensors = record.notes["audit"]["tensors"]
    return sum(tensor[count] for tensor in tensors if tensor["kind"] == kind)


class TestAccumulation:
    @pytest.mark.parametrize(
        ("accumulator", "term_dtype", "cast"),
        [
            ("float32", "float32", False),
            ("float16", "float16", False),
            ("float32", "float16", False),
            ("float32", "float16", True),
        ],
    )
    def test_the_four_programs_of_the_text_as_numpy_runs_them(
        self, accumulator: str, term_dtype: str, cast: bool
    ) -> None:
        wide, narrow = np.dtype(accumulator).type, np.dtype(term_dtype).type
        expected = wide(0)
        for _ in range(1000):
            expected = wide(expected + wide(narrow(0.01)))
        record = run(
            "task=accumulation",
            f"task.accumulator={accumulator}",
            f"task.term_dtype={term_dtype}",
            f"task.cast_term={cast}",
        )
        found = record.notes["accumulation"]
        assert found == {"sum": float(expected), "stored_term": float(narrow(0.01))}

    def test_the_table_says_which_rounding_cost_what(self) -> None:
        low = ("task=accumulation", "task.accumulator=float16", "task.term_dtype=float16")
        built = table_of("accumulation", run(*low))
        # 0.01 in float16 is 1311 / 2^17, a thousand of which are 10.0021; the sum stays at
        # 9.953125, where half of the gap between neighbours, 2^-8, is passed by 0.01 still.
        assert column(built, "result") == ["9.953125"]
        assert column(built, "error") == ["-4.7e-02"]
        assert column(built, "of the stored term") == ["2.1e-03"]
        assert column(built, "of the partial sums") == ["-4.9e-02"]

    @pytest.mark.parametrize(
        ("argument", "words"),
        [
            ("task.accumulator=int8", "task.accumulator=int8: must be one of float32"),
            ("task.num_terms=0", "task.num_terms=0: must be at least 1"),
            ("task.term=nan", "task.term=nan: must be a finite number"),
        ],
    )
    def test_what_cannot_be_added(self, argument: str, words: str) -> None:
        with pytest.raises(ValueError, match=words):
            compose_request(["task=accumulation", argument, "device=cpu"])


def toy_dtypes(*, fc1: str, ln: str, logits: str) -> dict[str, str]:
    return {
        "parameters": "float32",
        "output of fc1": fc1,
        "output of relu": fc1,
        "output of ln": ln,
        "logits": logits,
        "loss": "float32",
        "gradients of parameters": "float32",
        **{f"optimizer state {name}": "float32" for name in ("step", "exp_avg", "exp_avg_sq")},
    }


AUTOCAST = {"bf16": "bfloat16", "fp16": "float16"}


class TestDtypes:
    def test_toy_model_in_float32(self) -> None:
        found = dtypes(run(*TOY, "precision=fp32"))
        assert found == toy_dtypes(fc1="float32", ln="float32", logits="float32")

    @pytest.mark.parametrize("precision", AUTOCAST)
    def test_toy_model_on_a_cpu(self, precision: str) -> None:
        """Autocast for CPUs has no rule for layer_norm, which takes what it is given."""
        low = AUTOCAST[precision]
        found = dtypes(run(*TOY, f"precision={precision}"))
        assert found == toy_dtypes(fc1=low, ln=low, logits=low)

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    @pytest.mark.parametrize("precision", AUTOCAST)
    def test_toy_model_on_a_gpu_as_the_text_has_it(self, precision: str) -> None:
        low = AUTOCAST[precision]
        found = dtypes(run(*TOY, f"precision={precision}", device="cuda"))
        assert found == toy_dtypes(fc1=low, ln="float32", logits=low)

    @pytest.mark.parametrize("precision", AUTOCAST)
    def test_transformer_under_autocast(self, precision: str) -> None:
        """Linear layers and attention are low; what norms, sums and the loss are made of is not."""
        found = dtypes(run(*TINY, f"precision={precision}"))
        low = ("_proj", ".q", ".k", ".v", ".attend", ".w1", ".w2", ".w3", "logits")
        assert len(found) == 23
        for name, dtype in found.items():
            assert dtype == (AUTOCAST[precision] if name.endswith(low) else "float32"), name

    def test_pure_bfloat16(self) -> None:
        found = dtypes(run(*TINY, "precision=bf16_pure"))
        kept = {name for name, dtype in found.items() if dtype == "float32"}
        # The loss is computed from logits cast up; AdamW counts its steps in float32.
        assert kept == {"loss", "optimizer state step"}
        assert set(found.values()) == {"float32", "bfloat16"}


class TestErrors:
    @pytest.mark.parametrize("task", [TOY, TINY])
    def test_each_precision_errs_by_about_its_rounding(self, task: tuple[str, ...]) -> None:
        """Unit roundoffs are 2^-24, 2^-11 and 2^-8; errors of a few layers are some of them."""
        for precision, roundoff in (("fp32", 2**-24), ("fp16", 2**-11), ("bf16", 2**-8)):
            record = run(*task, f"precision={precision}")
            audit = record.notes["audit"]
            assert abs(audit["loss"] / audit["loss_float64"] - 1) < roundoff
            found = errors(record, "gradient")
            assert len(found) == (4 if task is TOY else 21)
            assert 0.1 * roundoff < max(found.values()) < 60 * roundoff

    def test_error_includes_the_rounding_of_parameters(self) -> None:
        found = errors(run(*TINY, "precision=bf16_pure"), "output")
        assert 2**-11 < found["embedding"] < 2**-8
        assert errors(run(*TINY, "precision=bf16"), "output")["embedding"] == 0

    def test_counts_by_eye(self) -> None:
        tiny = 2.0**-14
        got = torch.tensor([1.0, float("inf"), float("nan"), 0.0, 0.0, 0.0, tiny / 2, -tiny])
        expected = torch.tensor([1.0, 1e5, 1.0, 0.0, 1e-9, 0.5, tiny / 2, -tiny])
        found = compare(got.half(), expected.double(), compute=torch.float16)
        # The zero that should be 0.5 is no underflow; the one that should be 0 is right.
        counts = {"elements": 8, "overflowed": 2, "underflowed": 1, "subnormal": 1}
        assert found == {**found, **counts, "error_norm": None}

    def test_a_scaled_gradient_is_compared_with_the_scaled_reference(self) -> None:
        expected = torch.tensor([3e-9, 4e-9], dtype=torch.float64)
        found = compare((expected * 65536).float(), expected, compute=torch.float16, scale=65536)
        assert found["error_norm"] < 1e-15
        assert found["reference_norm"] == pytest.approx(5e-9)


class TestRange:
    def test_gradient_scaling_saves_small_gradients(self) -> None:
        task = (*TINY, "precision=fp16", "batch_size=8")
        plain, scaled = (
            run(*(item for item in task if item != "batch_size=2"), f"precision.grad_scaler={on}")
            for on in ("false", "true")
        )
        assert summed(plain, "output_gradient", "underflowed") > 100
        assert summed(scaled, "output_gradient", "underflowed") < 10
        assert scaled.notes["audit"]["loss_scale"] == 65536
        built = table_of("fp16_range", plain)
        under = sum(int(cell.replace(",", "")) for cell in column(built, "backward underflow"))
        assert under == summed(plain, "output_gradient", "underflowed")

    def test_bfloat16_has_the_range_that_float16_lacks(self) -> None:
        far = (*TOY, "task.input_scale=1e6")
        low = run(*far, "precision=fp16", "precision.grad_scaler=false")
        assert summed(low, "output", "overflowed") > 0
        assert low.notes["audit"]["loss"] is None
        built = table_of("precision_error", low)
        assert column(built, "loss error") == column(built, "gradient error") == ["inf"]
        wide = run(*far, "precision=bf16")
        assert summed(wide, "output", "overflowed") == 0
        assert wide.notes["audit"]["loss"] is not None

    def test_the_loss_scale_is_halved_until_nothing_overflows(self) -> None:
        """The gradient through ln is over the deviation of its input, here about sqrt(eps)."""
        record = run(*TOY, "task.input_scale=1e-3", "precision=fp16")
        audit = record.notes["audit"]
        assert audit["skipped_steps"] > 0
        assert audit["loss_scale"] == 65536 / 2 ** audit["skipped_steps"]
        assert summed(record, "gradient", "overflowed") == 0
        states = [t for t in audit["tensors"] if t["kind"] == "optimizer_state"]
        assert len(states) == 3


def test_a_task_that_does_not_attend_needs_no_backend() -> None:
    (case,) = compose_request([*TOY, "attention=flash_attn_4", "device=cpu"]).cases
    assert why_unsupported(case) is None
    assert "flash" not in case.slug + case.title


@pytest.mark.parametrize("task", ["accumulation", "precision_audit", "precision_audit_toy"])
def test_one_process_only(task: str) -> None:
    words = f"parallel.dp=2: task={task} runs in one process; leave it at 1"
    with pytest.raises(ValueError, match=words):
        compose_request([f"task={task}", "parallel=ddp_torch", "parallel.dp=2", "device=cpu"])


def test_the_sweep_has_the_four_programs_and_the_three_precisions() -> None:
    cases = compose_request(["sweeps=precision_audit", "device=cpu"]).cases
    programs = [case.task for case in cases if case.task.name == "accumulation"]
    found: list[Any] = [(item.accumulator, item.term_dtype, item.cast_term) for item in programs]
    assert sorted(found) == [
        ("float16", "float16", False),
        ("float32", "float16", False),
        ("float32", "float16", True),
        ("float32", "float32", False),
    ]
    for name in ("precision_audit", "precision_audit_toy"):
        audited = {case.precision.name for case in cases if case.task.name == name}
        assert audited >= {"fp32", "bf16", "fp16"}
