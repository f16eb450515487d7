"""attnbench-compare: what is the same stays the same, and a planted slowdown is found."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from records import ENVIRONMENT, in_rounds, make_record

from harness.analysis.frame import build_frame
from harness.commands.compare import (
    Sides,
    compared,
    comparison_table,
    differences,
    main,
    regressions,
)
from harness.commands.compare_summary import ROWS_IN_TERMINAL
from harness.reports.general.ratios_figure import MAX_ROWS, draw_comparison
from harness.store.record import Record, RecordStore, Round

NUM_SAMPLES = 100
NUM_CASES = 60
NUM_ROUNDS = 5

PHASES = ("forward", "backward", "forward_backward")


def noisy(random: np.random.Generator, median_ms: float) -> list[float]:
    """Samples as a GPU gives them: a floor, a right tail, stragglers, and slow drift.

    Half a percent of jitter above the floor, one pass in thirty a fifth slower, clocks that
    wander by a tenth of a percent, and a run as a whole off by a tenth.
    """
    tail = 1 + 0.005 * random.gamma(2.0, 1.0, NUM_SAMPLES)
    straggler = np.where(random.random(NUM_SAMPLES) < 1 / 30, 1.2, 1.0)
    drift = np.cumsum(random.normal(0, 0.0001, NUM_SAMPLES))
    run = random.normal(1, 0.001)
    return (median_ms * run * tail * straggler * (1 + drift)).tolist()


def measured(seed: int, slower: float = 1.0, **fields: object) -> list[Record]:
    """One run of sixty cases in rounds; every third one is ``slower`` times as slow."""
    random = np.random.default_rng(seed)
    records = []
    for index in range(NUM_CASES):
        factor = slower if index % 3 == 0 else 1.0
        times = {name: [noisy(random, factor * (1 + index / 7))] for name in PHASES}
        record = make_record(
            task="attention",
            mode="forward_backward",
            attention=("naive", "flex", "sdpa_flash")[index % 3],
            seq_len=128 * (1 + index // 3),
            samples_ms=times,
            started_at=f"2026-01-0{1 + seed % 9}T03:04:05+00:00",
            **fields,  # type: ignore[arg-type]
        )
        record.rounds = [NUM_SAMPLES // NUM_ROUNDS] * NUM_ROUNDS
        record.round_states = [
            Round(started_at=record.started_at, process=place) for place in range(NUM_ROUNDS)
        ]
        records.append(record)
    return records


def write(folder: Path, records: list[Record]) -> Path:
    store = RecordStore(folder)
    store.create()
    for record in records:
        store.write(record)
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same measured twice, once more with a planted 5% slowdown, and once with an OOM."""
    top = tmp_path_factory.mktemp("runs")
    broken = measured(4)
    broken[0] = make_record(
        task="attention",
        mode="forward_backward",
        attention="naive",
        seq_len=128,
        status="oom",
        message="CUDA out of memory",
    )
    return {
        "first": write(top / "first", measured(1)),
        "second": write(top / "second", measured(2)),
        "slower": write(top / "slower", measured(3, slower=1.05)),
        "broken": write(top / "broken", broken),
    }


def verdicts(folder: Path) -> pd.Series:
    return pd.read_csv(folder / "comparison.csv")["outcome"]


@pytest.mark.parametrize("seed", [100, 102, 104, 106])
def test_measured_twice_is_the_same(seed: int) -> None:
    rows = compared(sides_of(measured(seed), measured(seed + 1)), "whole")
    assert set(rows["outcome"]) <= {"SAME", "UNCLEAR"}
    assert len(rows) == 60
    assert (rows["outcome"] == "SAME").sum() > 30
    assert not rows["in_turns"].any()
    assert {level.num_cases for level in rows["level"]} <= {60}


def test_runs_of_one_round_are_never_told_apart() -> None:
    """Without rounds nothing shows what a run does to a case."""
    sides = []
    for ms in (1.0, 2.0):
        sides.append([make_record(samples_ms={"step": [[ms] * 30]})])
    rows = compared(sides_of(*sides), "whole")
    assert list(rows["outcome"]) == ["UNCLEAR"]
    assert "until=decided" in rows["why"].iloc[0]


def test_a_machine_without_calibration_is_assumed_to_vary() -> None:
    for ms, words in ((11.0, ["UNCLEAR"]), (20.0, ["SLOWER"])):
        sides = []
        for index, time in enumerate((10.0, ms)):
            record = in_rounds(make_record(samples_ms={"step": [[time] * 3]}))
            for state in record.round_states:
                state.process = 7
            del record.notes["rounds_started_at"]
            record.started_at = f"2026-01-0{index + 1}T03:04:05+00:00"
            sides.append([record])
        rows = compared(sides_of(*sides), "whole")
        assert list(rows["outcome"]) == words
        level = rows["level"].iloc[0]
        assert (level.num_processes, level.std_log) == (0, 0.05)
        assert "assumed" in comparison_table(rows, ("a", "b"), "whole").caption


def sides_of(one: list[Record], other: list[Record]) -> Sides:
    frames = [build_frame(records) for records in (one, other)]
    first, second = (frame.assign(pair=frame["case_id"]) for frame in frames)
    return Sides(names=("one", "other"), frames=(first, second))


def test_a_planted_slowdown_is_found_and_nothing_else(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(runs["first"]), str(runs["slower"]), "--output", str(tmp_path)]
    assert main([*arguments, "--bound", "2"]) == 1
    rows = pd.read_csv(tmp_path / "comparison.csv")
    slower = rows["outcome"] == "SLOWER"
    assert set(rows.loc[slower, "attention"]) == {"naive"}
    assert slower.sum() == 20
    assert set(rows.loc[~slower, "outcome"]) <= {"SAME", "UNCLEAR"}
    assert rows.loc[slower, "ratio"].between(1 / 1.06, 1 / 1.04).all()
    inside = (rows["ratio_low"] <= rows["ratio"]) & (rows["ratio"] <= rows["ratio_high"])
    assert inside.all()
    line = capsys.readouterr().out.splitlines()[-1]
    assert "20 SLOWER" in line
    assert line.endswith("20 regressions beyond 2%")
    # Within what the user allows, they are none; the other way round they are gains.
    back = compared(sides_of(measured(3, slower=1.05), measured(1)), "whole")
    assert (back["outcome"] == "FASTER").sum() == 20
    assert regressions(back, 0).empty
    forth = compared(sides_of(measured(1), measured(3, slower=1.05)), "whole")
    assert regressions(forth, 8).empty
    assert len(regressions(forth, 0)) == 20


def test_a_case_that_has_no_result_any_more_is_a_regression(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    arguments = ["--output", str(tmp_path), "--bound", "50"]
    assert main([str(runs["first"]), str(runs["broken"]), *arguments]) == 1
    assert (verdicts(tmp_path) == "lost").sum() == 1
    assert "OOM" in (tmp_path / "comparison.md").read_text()
    broken = list(RecordStore(runs["broken"]).load()[0].values())
    rows = compared(sides_of(broken, measured(1)), "whole")
    assert (rows["outcome"] == "gained").sum() == 1
    assert regressions(rows, 50).empty


def test_a_narrow_terminal_shows_the_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sides = []
    for name, factor in (("before_this_change", 1.0), ("after_this_change", 2.0)):
        records = [
            in_rounds(
                make_record(
                    model=model,
                    attention=attention,
                    precision=precision,
                    seq_len=seq_len,
                    samples_ms={"step": [[(1.0 if attention == "sdpa" else factor) * 12.0] * 3]},
                )
            )
            for model in ("small", "medium")
            for attention in ("naive", "sdpa")
            for precision in ("bf16", "fp32")
            for seq_len in (512, 1024)
        ]
        sides.append(str(write(tmp_path / name, records)))
    for width, left_out in (("80", ["interval"]), ("56", ["interval", "before_this_change"])):
        monkeypatch.setenv("COLUMNS", width)
        assert main(sides) == 0
        lines = capsys.readouterr().out.splitlines()
        header = next(line for line in lines if "verdict" in line)
        assert "ratio" in header
        end = lines.index(next(line for line in lines if line.startswith("Not shown: 8 SAME.")))
        table = "\n".join(lines[lines.index("") : end])
        assert not any(word in table for word in left_out)
        assert sum("0.500" in line and line.rstrip().endswith("SLOWER") for line in lines) == 8


def test_a_terminal_says_which_rows_it_leaves_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wide intervals go before others do, and then those whose ratios are nearest to 1."""
    wide = [1.0, 5.0, 10.0]
    for num_slower, words in (
        (2, "Not shown: 45 UNCLEAR, 1 SAME."),
        (
            ROWS_IN_TERMINAL + 1,
            "The 40 rows farthest from 1; not shown: 45 UNCLEAR, 1 SAME, 1 SLOWER.",
        ),
    ):
        sides = []
        for name, factor in (("a", 1.0), ("b", 2.0)):
            clear = [
                make_record(seq_len=64 * place, samples_ms={"step": [[factor] * 3]})
                for place in range(1, num_slower + 1)
            ]
            scattered = [
                make_record(seq_len=64 * place, attention="sdpa", samples_ms={"step": [wide]})
                for place in range(1, 46)
            ]
            same = make_record(attention="flex", samples_ms={"step": [[1.0] * 3]})
            folder = tmp_path / f"{name}{num_slower}"
            rounds = [in_rounds(record) for record in (*clear, *scattered, same)]
            sides.append(str(write(folder, rounds)))
        assert main(sides) == 0
        out = capsys.readouterr().out
        assert words in out
        assert sum(line.rstrip().endswith("SLOWER") for line in out.splitlines()) == min(
            num_slower, ROWS_IN_TERMINAL
        )


def test_a_figure_says_that_it_shows_the_most_changed() -> None:
    sides = sides_of(measured(1), measured(3, slower=1.05))
    rows = compared(sides, "whole")
    drawn = draw_comparison(rows, sides.names, None)
    assert drawn is not None
    axes = drawn.figure.axes[0]
    assert axes.get_title() == f"the {MAX_ROWS} most changed of 60 cases"
    legend = axes.get_legend()
    assert legend is not None
    counts = [text.get_text() for text in legend.get_texts()]
    assert "SLOWER (20 of 20)" in counts
    few = draw_comparison(rows[:3], sides.names, None)
    assert few is not None
    assert few.figure.axes[0].get_title() == ""


def test_files_are_written_where_the_user_says_and_nowhere_else(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    before = {path for name in ("first", "second") for path in runs[name].rglob("*")}
    sides, folder = [str(runs["first"]), str(runs["second"])], tmp_path / "out"
    assert main(sides) == 0
    assert main([*sides, "--output", str(folder)]) == 0
    assert {path for name in ("first", "second") for path in runs[name].rglob("*")} == before
    names = {path.name for path in folder.iterdir()}
    assert names == {f"comparison.{end}" for end in ("csv", "md", "tex", "png", "svg", "pdf")}
    text = (folder / "comparison.md").read_text()
    assert "second against first" in text
    assert r"\toprule" in (folder / "comparison.tex").read_text()


def test_two_backends_of_one_folder(runs: dict[str, Path], tmp_path: Path) -> None:
    records = [
        in_rounds(
            make_record(seq_len=seq_len, attention=attention, samples_ms={"step": [[ms] * 5]})
        )
        for seq_len in (512, 1024)
        for attention, ms in (("naive", 20.0), ("flex", 10.0), ("sdpa_flash", 20.1))
    ]
    folder = write(tmp_path / "results", records)
    out = tmp_path / "out"
    assert main(["naive", "flex", "--in", str(folder), "--output", str(out), "--bound", "1"]) == 0
    rows = pd.read_csv(out / "comparison.csv")
    assert list(rows["ratio"]) == pytest.approx([2.0, 2.0])
    assert set(rows["outcome"]) == {"FASTER"}
    caption = (out / "comparison.md").read_text().splitlines()[0]
    assert "flex against naive" in caption
    assert "All rows: model small, batch 4" in caption
    assert "attention" not in caption
    assert main(["naive", "sdpa_flash", "--in", str(folder), "--output", str(out)]) == 0
    assert set(verdicts(out)) == {"SAME"}


def test_two_revisions_of_one_folder(tmp_path: Path) -> None:
    old, new = (
        in_rounds(
            make_record(
                samples_ms={"step": [[ms] * 5], "forward": [[7.0] * 5]},
                environment={**ENVIRONMENT, "git_revision": revision},
            )
        )
        for ms, revision in ((10.0, "aaaa111"), (12.0, "bbbb222"))
    )
    folder = write(tmp_path / "results", [old, new])
    arguments = ["aaaa111", "bbbb2", "--in", str(folder), "--output", str(tmp_path / "out")]
    assert main([*arguments, "--bound", "19"]) == 1
    assert main([*arguments, "--bound", "21"]) == 0
    assert main([*arguments, "--metric", "forward", "--bound", "0"]) == 0
    assert set(verdicts(tmp_path / "out")) == {"SAME"}


def test_what_two_folders_differ_in_is_found() -> None:
    other = {**ENVIRONMENT, "device_name": "NVIDIA H100"}
    sides = sides_of(measured(1), measured(2, environment=other))
    assert differences(sides) == ["device_name"]
    assert differences(sides_of(measured(1), measured(2))) == []


def test_memory_has_no_interval(tmp_path: Path) -> None:
    folders = []
    for name, gib in (("a", 2), ("b", 3)):
        memory = [{"source": "cuda", "peak_allocated_bytes": gib * 2**30}]
        record = make_record(samples_ms={"step": [[1.0] * 5]}, memory=memory)
        folders.append(str(write(tmp_path / name, [record])))
    out = tmp_path / "out"
    arguments = [*folders, "--metric", "peak_memory", "--output", str(out)]
    assert main([*arguments, "--bound", "49"]) == 1
    assert main([*arguments, "--bound", "51"]) == 0
    rows = pd.read_csv(out / "comparison.csv")
    assert list(rows["outcome"]) == ["MORE"]
    assert list(rows["ratio"].round(3)) == [0.667]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere", "{second}"], "A=nowhere: no such results folder"),
        (["{first}", "gone"], "B=gone: no such results folder"),
        (["naive", "flax", "--in", "{first}"], "B=flax: neither a git revision nor an attention"),
        (["naive", "flex", "--in", "gone"], "--in=gone: no such folder"),
        (["{first}", "{second}", "--metric", "speed"], "--metric=speed: no case has it; one of"),
        (["{first}", "{empty}"], "holds no readable records"),
        (["{first}", "{first}"], "are one folder, whose records are equal to themselves"),
        (["naive", "naive", "--in", "{first}"], "A=naive and B=naive: are one, whose records are"),
        (["naive", "flex", "--in", "{first}", "--sweep", "x"], "has no such sweep; there are none"),
    ],
)
def test_what_cannot_be_compared_is_one_line(
    runs: dict[str, Path],
    tmp_path: Path,
    arguments: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    places = {name: str(path) for name, path in runs.items()} | {"empty": str(tmp_path)}
    assert main([argument.format(**places) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert len(error.splitlines()) == 1


def test_arguments_that_are_missing_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["naive"])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("attnbench-compare: the following arguments are required: B; usage: ")


def test_a_bound_is_a_percentage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["a", "b", "--bound", "much"])
    assert "much: must be a percentage" in capsys.readouterr().err
