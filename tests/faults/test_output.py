"""Readers that go away, full disks, closed descriptors and terminals that know only ASCII.

Every test runs the real commands. Nothing that happens to their output may change what is
measured, and a reader that has gone not even how it ends.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Command
from fault_folders import GUARD_S, STEP, Folder
from records import make_record, write_plan

from harness.commands import output
from harness.store.record import RecordStore

LOST = "attnbench: standard output cannot be written ({}); the command goes on, and all that it "
LOST += "measures is recorded"

TWO = ("naive", "sdpa")

ASCII = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii:strict", "TERM": "dumb", "PYTHONUTF8": "0"}


def run_with(
    arguments: list[str], stdout: Any, environment: dict[str, str] | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command whose standard output is ``stdout``."""
    return subprocess.run(
        [sys.executable, *arguments],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ
        | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
        | (environment or {}),
        timeout=GUARD_S,
        check=False,
        **options,
    )


def closed_pipe() -> int:
    """The end for writing of a pipe that nobody reads any more."""
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    return write_fd


def console(function: str, *arguments: str) -> list[str]:
    """A command line that starts one of the console scripts."""
    code = f"import sys; from harness.commands import console; sys.exit(console.{function}())"
    return ["-c", code, *arguments]


def test_a_line_of_a_measuring_command_leaves_when_it_is_printed() -> None:
    """Through a pipe, while the command goes on: here it waits for its input to end."""
    code = (
        "import sys; from harness.commands.output import Streams, begin_measuring; "
        "Streams('attnbench').install(); begin_measuring(); print('first'); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], GUARD_S)
        process.stdin.close()
        assert ready, "the line has come before the command ends"
        assert process.stdout.readline() == b"first\n"


@pytest.fixture(scope="module")
def unread(
    tmp_path_factory: pytest.TempPathFactory, command: Command
) -> tuple[Folder, subprocess.CompletedProcess[str]]:
    """Two cases, measured while nobody reads what the command prints."""
    folder = Folder(path=tmp_path_factory.mktemp("measured"), command=command, grids=[STEP])
    arguments = ["-m", "harness", *folder.arguments("attention=naive,witness")]
    return folder, run_with(arguments, closed_pipe(), folder.environment())


class TestMeasuring:
    def test_goes_on_when_the_reader_has_gone(
        self, unread: tuple[Folder, subprocess.CompletedProcess[str]]
    ) -> None:
        folder, done = unread
        assert (done.returncode, done.stderr) == (0, LOST.format("Broken pipe") + "\n")
        statuses = {name: record["status"] for name, record in folder.records().items()}
        assert statuses == {"naive": "ok", "witness": "ok"}
        assert len(list(folder.results.glob("sweeps/*/report.md"))) == 1

    def test_without_any_descriptor(self, tmp_path: Path, command: Command) -> None:
        """Closed ones must not be given to files that are opened later."""
        folder = Folder(path=tmp_path, command=command)
        script = 'exec "$0" "$@" <&- >&- 2>&-'
        arguments = ["-m", "harness", *folder.arguments("attention=naive")]
        done = subprocess.run(
            ["sh", "-c", script, sys.executable, *arguments],
            cwd=ROOT,
            env=os.environ | folder.environment() | {"CUDA_VISIBLE_DEVICES": ""},
            timeout=GUARD_S,
            check=False,
        )
        assert done.returncode == 0
        assert folder.records()["naive"]["status"] == "ok"
        for path in folder.results.rglob("*.json"):
            json.loads(path.read_bytes())

    def test_in_ascii(self, unread: tuple[Folder, subprocess.CompletedProcess[str]]) -> None:
        """Nothing is left to measure, so this shows the table alone."""
        folder, _ = unread
        done = run_with(
            ["-m", "harness", *folder.arguments("attention=naive,witness")],
            subprocess.PIPE,
            folder.environment() | ASCII,
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.isascii()
        rows = [
            line for line in done.stdout.splitlines() if line.startswith(("naive ", "witness "))
        ]
        rows = [row for row in rows if "|" in row]
        bars = [[index for index, word in enumerate(row) if word == "|"] for row in rows]
        assert len(rows) == 2
        assert bars[0] == bars[1]
        assert rows[0].rstrip().endswith("1.00x")

    def test_disk_full(self, unread: tuple[Folder, subprocess.CompletedProcess[str]]) -> None:
        """All is measured already, so this is the table alone."""
        folder, _ = unread
        with open("/dev/full", "w") as full:
            done = run_with(
                ["-m", "harness", *folder.arguments("attention=naive,witness")],
                full,
                folder.environment(),
            )
        assert (done.returncode, done.stderr) == (
            1,
            LOST.format("No space left on device") + "\n",
        )

    def test_standard_error_has_gone_too(self, tmp_path: Path) -> None:
        gone = closed_pipe()
        arguments = ["-m", "harness", "plan=true", "model=tiny", "device=cpu"]
        done = subprocess.run(
            [sys.executable, *arguments, f"results={tmp_path}"],
            cwd=ROOT,
            stdout=gone,
            stderr=gone,
            timeout=GUARD_S,
            check=False,
        )
        assert done.returncode == 0


PLAN = ("attnbench", "plan=true", "model=tiny", "device=cpu", "results=RESULTS")
HELP = ("attnbench", "--help")
CONFIG = ("attnbench", "--cfg", "job")
HELP_OF_ANOTHER = ("status", "--help")
READERS = (
    ("status", "RESULTS"),
    ("report", "RESULTS"),
    ("compare", "RESULTS", "RESULTS/../others"),
    ("pack", "RESULTS"),
    ("cancel", "RESULTS"),
)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two cases that nobody has to measure."""
    folder = tmp_path_factory.mktemp("two") / "results"
    records = [make_record(attention=name, samples_ms={"step": [[1.0]]}) for name in TWO]
    store = RecordStore(folder)
    store.create()
    for record in records:
        store.write(record)
    write_plan(folder, "all", records, tables=["summary"])
    shutil.copytree(folder, folder.parent / "others")
    return folder


class TestOtherCommands:
    """Those whose output is all that they are for, or says what they have done."""

    def started(self, words: tuple[str, ...], results: Path) -> list[str]:
        """The command line of a console script and its arguments."""
        return console(*(word.replace("RESULTS", str(results)) for word in words))

    @pytest.mark.parametrize("words", [PLAN, HELP, CONFIG, *READERS], ids=" ".join)
    def test_end_quietly_when_the_reader_has_gone(
        self, words: tuple[str, ...], results: Path
    ) -> None:
        done = run_with(self.started(words, results), closed_pipe())
        assert (done.returncode, done.stderr) == (0, "")

    @pytest.mark.parametrize("words", [PLAN, HELP, CONFIG, HELP_OF_ANOTHER, *READERS], ids=" ".join)
    def test_say_that_the_disk_is_full(self, words: tuple[str, ...], results: Path) -> None:
        with open("/dev/full", "w") as full:
            done = run_with(self.started(words, results), full)
        name = words[0] if words[0] == "attnbench" else f"attnbench-{words[0]}"
        assert (done.returncode, done.stderr) == (
            1,
            f"{name}: standard output cannot be written (No space left on device)\n",
        )

    @pytest.mark.parametrize("words", [PLAN, HELP, HELP_OF_ANOTHER, READERS[0]], ids=" ".join)
    def test_say_that_the_output_is_closed(self, words: tuple[str, ...], results: Path) -> None:
        arguments = ["-c", 'exec "$0" "$@" >&-', sys.executable, *self.started(words, results)]
        done = subprocess.run(
            ["sh", *arguments],
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)},
            timeout=GUARD_S,
            check=False,
        )
        assert done.returncode == 1
        (line,) = done.stderr.splitlines()
        assert line.endswith("standard output cannot be written (Bad file descriptor)")

    def test_what_has_failed_anyway_keeps_its_exit_code(
        self, results: Path, tmp_path: Path
    ) -> None:
        """A report of two sweeps of which one cannot be read."""
        folder = shutil.copytree(results, tmp_path / "results")
        (folder / "sweeps" / "odd").mkdir()
        (folder / "sweeps" / "odd" / "plan.json").write_text("{")
        with open("/dev/full", "w") as full:
            done = run_with(self.started(("report", "RESULTS"), folder), full)
        assert done.returncode == 2
        assert "standard output cannot be written" in done.stderr


class TestReplacements:
    @pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp437", "utf-8"])
    def test_every_character_can_be_written(self, encoding: str) -> None:
        output.Streams("any")
        output.codecs.register_error(output.LEGIBLE, output.replace_character)
        everything = "".join(map(chr, range(0x600))) + "\ud800\udcff\U0001f600"
        written = everything.encode(encoding, output.LEGIBLE)
        if encoding == "ascii":
            assert written.isascii()
        assert b"\\ud800\\udcff" in written

    def test_columns_stay(self) -> None:
        assert all(len(similar) == 1 for similar in output.SIMILAR.values())
        output.codecs.register_error(output.LEGIBLE, output.replace_character)
        assert "1.2\u00d7 \u00b13 \u00b5s".encode("ascii", output.LEGIBLE) == b"1.2x ~3 us"


def test_a_terminal_that_another_program_has_made_non_blocking() -> None:
    """What does not fit now is written once there is room."""
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    text = "x" * 300_000
    code = "import sys; from harness.commands.output import Streams; Streams('any').install(); "
    with subprocess.Popen(
        [sys.executable, "-c", f"{code} print('x' * 300_000)"],
        stdout=write_fd,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    ):
        os.close(write_fd)
        with os.fdopen(read_fd) as reader:
            assert reader.read() == text + "\n"
