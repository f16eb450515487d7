"""benchmarks.kernel_trees: kernels of several source trees in turns, on a CPU."""

from __future__ import annotations

import argparse
import contextlib
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from fault_folders import heed_signals

from benchmarks.kernel_trees import Arm, Shape, lines_of, main, shape_of

ROOT = Path(__file__).parents[3]


def test_shapes() -> None:
    sizes = {"batch_size": 2, "heads": 8, "tokens": 64, "head_dim": 16}
    assert shape_of("2x8x64x16") == Shape(text="2x8x64x16", kv_heads=8, **sizes)
    text = "2x8:4x64x16/window=9"
    assert shape_of(text) == Shape(text=text, kv_heads=4, window=9, **sizes)
    assert not shape_of("2x8x64x16/full").causal
    text = "2x8x64x24:16/full"
    assert shape_of(text) == Shape(
        text=text, kv_heads=8, causal=False, **sizes | {"head_dim": 24, "value_dim": 16}
    )
    text = "2x8x64x16/full/ragged"
    ragged = shape_of(text)
    assert ragged == Shape(text=text, kv_heads=8, causal=False, packing="ragged", **sizes)
    assert len(set(ragged.lengths)) == 2
    assert shape_of("2x8x64x16/packed").lengths == [64, 64]
    assert shape_of("4x8x64x16/skewed").lengths == [130, 42, 42, 42]
    assert shape_of("1x8x64x16/skewed").lengths == [64]
    for wrong in (
        "2x8x64x64:128",
        "2x8x64",
        "2x8:3x64x16",
        "0x8x64x16",
        "2x8x64x16/window",
        "2x8x64x16/dense",
    ):
        with pytest.raises(argparse.ArgumentTypeError, match=wrong):
            shape_of(wrong)


def test_trees_are_measured_and_one_that_is_broken_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken" / "kernels").mkdir(parents=True)
    (tmp_path / "broken" / "kernels" / "__init__.py").write_text("raise ImportError('not here')")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "kernels").symlink_to(ROOT / "kernels")
    run = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.kernel_trees", "--backend", "flash_torch"),
            *(
                "--shapes",
                "1x2:1x32x8",
                "1x2x32x8/window=4",
                "2x2x32x8/ragged",
                "--rounds",
                "2",
                "--calls",
                "1",
            ),
            *(f"mine={ROOT}", f"other={tmp_path / 'other'}", f"broken={tmp_path / 'broken'}"),
            "sdpa_flash",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 1
    assert "ImportError: not here" in run.stderr
    lines = [line.split() for line in run.stdout.splitlines()]
    assert [line[0] for line in lines] == [
        *("1x2:1x32x8", "mine", "other", "broken", "sdpa_flash"),
        *("1x2x32x8/window=4", "mine", "other", "broken", "sdpa_flash"),
        *("2x2x32x8/ragged", "mine", "other", "broken", "sdpa_flash"),
    ]
    for line in (*lines[1:3], lines[4], *lines[6:8], *lines[11:13]):
        assert line[1] == "forward"
        assert float(line[2]) > 0
        assert "size" not in line
    assert lines[1][5] == "1.000"
    assert "takes no attention.window=4" in " ".join(lines[9])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name the trees"),
        (["old=/nowhere"], "/nowhere has no folder kernels"),
        (["flash_tritton"], "flash_tritton"),
        (["standard"], "attention=standard: no backend that attends to whole sequences"),
        (["naive", "--shapes", "1x2"], "1x2: must be like"),
        (["naive", "--rounds", "0"], "0: must be a number from 1 on"),
    ],
)
def test_what_makes_no_sense_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["kernel_trees", *arguments])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert message in capsys.readouterr().err


def test_a_shape_that_fails_counts_though_the_last_one_works(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shapes = ("1x2x32x8/window=4", "1x2x32x8")
    options = ("--rounds", "1", "--calls", "1")
    monkeypatch.setattr(
        sys, "argv", ["kernel_trees", "naive", "sdpa", *options, "--shapes", *shapes]
    )
    assert main() == 1
    assert "takes no attention.window=4" in capsys.readouterr().out


def test_ctrl_c_ends_the_other_processes(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text(
        f"import os, time\nopen({str(tmp_path / 'started')!r}, 'x').write(str(os.getpid()))\n"
        "time.sleep(3600)\n"
    )
    # Longer than a test may take: whoever waits for it hangs.
    patience = ["--patience-s", "3600"]
    command = [sys.executable, "-m", "benchmarks.kernel_trees", f"slow={tmp_path}", *patience]
    with subprocess.Popen(
        command, cwd=ROOT, stderr=subprocess.PIPE, text=True, preexec_fn=heed_signals
    ) as run:
        pid = ""
        while not pid and run.poll() is None:
            with contextlib.suppress(FileNotFoundError):
                pid = (tmp_path / "started").read_text()
            time.sleep(0.1)
        run.send_signal(signal.SIGINT)
        try:
            assert run.wait() == 130
        finally:
            run.kill()
        assert run.stderr is not None
        assert run.stderr.read() == "interrupted\n"
    assert not Path(f"/proc/{pid}").exists()


def test_one_that_prints_and_hangs_is_given_up() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", "print('loading', flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        hanging = Arm(name="a", process=process, patience_s=2.0)
        assert hanging.answer() == {"error": "no answer in 2 s"}
        assert not hanging.works
        assert process.wait() == -signal.SIGKILL


def test_a_full_disk_ends_it_in_one_line() -> None:
    command = [sys.executable, "-m", "benchmarks.kernel_trees", "naive", "--rounds", "1"]
    with open("/dev/full", "w") as full:
        run = subprocess.run(
            [*command, "--calls", "1", "--shapes", "1x1x16x8"],
            cwd=ROOT,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert run.returncode == 1
    assert run.stderr == "output: No space left on device\n"


def arm(name: str, *, same: bool = True, size: float = 100.0, **others: Any) -> Arm:
    found = Arm(name=name, process=Mock(), patience_s=1.0, **others)
    found.first = {"sums": [size, 1.0, 1.0], "same": same}
    found.rounds = [{"forward": 1.0, "backward": t} for t in (1.0, 2.0, 4.0)]
    return found


def test_what_differs_is_named() -> None:
    fine, loose, wrong = lines_of([arm("a"), arm("b", same=False), arm("c", size=98.0)])
    assert fine.endswith("2.0000 ms  ratio 1.000  range 1.500")
    assert loose.endswith("two passes differ")
    assert wrong.endswith("gradients of another size")


def test_ratios_are_of_the_same_round_and_passes_can_be_left_out() -> None:
    first, second = arm("a"), arm("b")
    second.rounds = [{"forward": 1.0, "backward": t} for t in (3.0, 2.2, 4.4)]
    row = list(lines_of([first, second], ["backward"]))[1]
    # Medians are 2 and 3; round by round it takes 3, 1.1 and 1.1 of the time.
    assert "3.0000 ms  ratio 1.100" in row
    assert "forward" not in row
