"""What the Hopper kernels are for, that they compile anywhere, and which tensors are copied."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kernels.backends import flash_triton
from kernels.flash import dispatch
from kernels.flash.call.problem import PRECISIONS, describe
from kernels.flash.hopper import launch as hopper
from kernels.flash.hopper import plans

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("head_dim", "spilled_bytes"),
    # A register or a few that are used outside the loops, or where masks are: at 64 one, behind the
    # loops of halves. At 256 the backward pass took a third longer while addresses of its loop were
    # spilled, 300 bytes.
    [
        (128, 16),
        (256, 16),
        *(
            pytest.param(head_dim, spilled, marks=pytest.mark.exhaustive)
            for head_dim, spilled in ((16, 16), (32, 16), (64, 4), (96, 16), (192, 16))
        ),
    ],
)
@pytest.mark.parametrize("kernel", ["forward", "backward"])
def test_compiles_without_serialised_matmuls(
    kernel: str, head_dim: int, spilled_bytes: int
) -> None:
    pytest.importorskip("triton.experimental.gluon")
    check_report(compiled(kernel, str(head_dim)), kernel, head_dim, spilled_bytes)


@pytest.mark.parametrize(
    "kernel", ["forward", pytest.param("backward", marks=pytest.mark.exhaustive)]
)
def test_values_narrower_than_keys_compile(kernel: str) -> None:
    """In the backward pass what bounds the loops is spilled, and read between them."""
    pytest.importorskip("triton.experimental.gluon")
    check_report(compiled(kernel, "192/128"), kernel, 192, 48 if kernel == "backward" else 0)


def compiled(kernel: str, head_dim: str) -> str:
    """The report of benchmarks.compile_hopper, in a process of its own: this one may interpret."""
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.compile_hopper", kernel, head_dim],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    return run.stdout


def check_report(report: str, kernel: str, head_dim: int, spilled_bytes: int) -> None:
    rows = [line for line in report.splitlines() if line.startswith(kernel)]
    # Neither programs of more than one query tile fit beside 256 columns, nor small ones; three
    # consumers have registers for 64.
    forward = 11 if head_dim <= 64 else 6 if head_dim <= 128 else 2
    # With 65 to 128 columns halves may be added apart or not.
    backward = 8 if head_dim > 128 else 11 if head_dim > 64 else 9
    assert len(rows) == (forward if kernel == "forward" else backward)
    finishing = [line for line in report.splitlines() if line.startswith("finish_dq")]
    assert len(finishing) == (0 if kernel == "forward" else 2 if head_dim > 128 else 3)
    for row in rows:
        spilled = re.search(r"(\d+) bytes spill stores", row)
        assert spilled is not None
        # With turned heads what bounds the loops is spilled, and read between them.
        is_turned = "turned" in row or "in part" in row or "halves" in row
        assert int(spilled[1]) <= (max(spilled_bytes, 48) if is_turned else spilled_bytes), row


class TestWhatItLeavesToThePlainKernels:
    def reason(self, monkeypatch: pytest.MonkeyPatch, **changes: object) -> str | None:
        """hopper.why_not as a Hopper GPU would hear it."""
        monkeypatch.setattr(hopper.any_gpu, "INTERPRETED", False)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        q = torch.empty(2, 4, 8, 64, dtype=torch.bfloat16)
        problem = replace(describe(q, q, q, causal=True), device=torch.device("cuda", 0))
        return hopper.why_not(replace(problem, **changes))  # type: ignore[arg-type]

    def test_runs_what_it_is_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.reason(monkeypatch) is None
        assert self.reason(monkeypatch, head_dim=80, packed=True) is None
        assert self.reason(monkeypatch, head_dim=256) is None

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"dtype": torch.float32}, "bfloat16 and float16"),
            ({"head_dim": 264}, "at most 256"),
            ({"head_dim": 36}, "multiple of 8"),
            ({"accumulates": True}, "accumulator"),
            ({"batch_size": 20_000}, "65535"),
            ({"device": torch.device("cpu")}, "9.0"),
        ],
    )
    def test_says_why_not(
        self, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], words: str
    ) -> None:
        reason = self.reason(monkeypatch, **changes)
        assert reason is not None
        assert words in reason
        assert "\n" not in reason

    def test_older_gpus(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(hopper.any_gpu, "INTERPRETED", False)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
        q = torch.empty(1, 1, 8, 64, dtype=torch.bfloat16)
        problem = replace(describe(q, q, q, causal=True), device=torch.device("cuda", 0))
        assert "8.0" in str(hopper.why_not(problem))

    def test_is_asked_first(self) -> None:
        assert ("auto", *dispatch.IMPLEMENTATIONS) == flash_triton.IMPLEMENTATIONS

    def test_names_of_precisions(self) -> None:
        assert PRECISIONS == flash_triton.PRECISIONS

    def test_an_unknown_one_is_refused_before_anything_runs(self) -> None:
        with pytest.raises(ValueError, match="=hoper: must be one of auto, hopper"):
            flash_triton.FlashTriton(name="flash_triton", implementation="hoper")


class TestAddressable:
    """TMA wants 16-byte aligned rows; what is not laid out so is copied."""

    def test_no_copy_of_what_a_transformer_stores(self) -> None:
        x = torch.empty(2, 8, 4, 64, dtype=torch.bfloat16).transpose(1, 2)
        assert plans.addressable(x) is x

    @pytest.mark.parametrize("how", ["expanded", "odd rows", "misaligned"])
    def test_copies(self, how: str) -> None:
        x = torch.randn(2 * 4 * 8 * 72 + 1).to(torch.bfloat16)
        views = {
            "expanded": x[:64].expand(2, 4, 8, 64),
            "odd rows": x[: 2 * 4 * 8 * 65].view(2, 4, 8, 65)[..., :64],
            "misaligned": x[1 : 2 * 4 * 8 * 64 + 1].view(2, 4, 8, 64),
        }
        copy = plans.addressable(views[how])
        assert copy is not views[how]
        assert copy.is_contiguous()
        assert copy.data_ptr() % 16 == 0
        assert (copy == views[how]).all()


def test_copies_behind_matmuls_wait_for_all_warps() -> None:
    """What benchmarks.compile_hopper looks for in the PTX of small programs."""
    pytest.importorskip("triton.experimental.gluon")
    from benchmarks.compile_hopper import unguarded

    wait, meet, copy = "wgmma.wait_group.sync.aligned 0;", "bar.sync 0;", "cp.async.bulk.tensor.4d"
    assert unguarded("\n".join((copy, wait, meet, copy, copy))) == []
    assert unguarded("\n".join((meet, copy, wait, copy, meet))) != []
