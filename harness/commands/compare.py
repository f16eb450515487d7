"""``attnbench-compare A B``: what became faster or slower, and whether the measurement can tell.

A and B are two results folders, or two git revisions or two attention backends within the
folder ``--in``; ``--sweep`` leaves all cases but a sweep's out. Files are written where
``--output`` says, and nowhere else. Cases that are equal in everything else are paired, and each
pair is FASTER, SLOWER, SAME or UNCLEAR: B against A.

The two sides are runs, each with clocks, addresses and neighbours of its own, which no number of
samples shows. The interval of a ratio is therefore widened by the machine's run-to-run level: that
of a calibration in either folder, or one that is assumed and said so. Cases of one folder that were
measured in turns need no such level.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from harness.analysis.comparison import fullest_phase, host_marks, paired
from harness.analysis.frame import build_frame
from harness.analysis.row_verdicts import interval_cells, reasons, rule_words
from harness.analysis.verdicts import EQUIVALENCE
from harness.cases import format as fmt
from harness.cases.columns import POINTS, point_groups
from harness.cases.recorded import load_attempts
from harness.commands.compare_summary import for_terminal, summary
from harness.commands.results_folder import OneLineParser, complain
from harness.did_you_mean import did_you_mean
from harness.printing import say, warn
from harness.render.figure import CaptionedFigure, save
from harness.render.files import put, render_terminal, to_csv, to_markdown
from harness.render.latex import to_latex
from harness.render.rows import marks_of
from harness.render.table import Column, Table, make_table
from harness.reports.general.ratios_figure import draw_comparison
from harness.store.attempts import Records
from harness.store.record import Record, RecordStore
from harness.store.sweep_plan import planned_labels, read_plan
from harness.terminal import PrintableConsole

COMMAND = "attnbench-compare"

Attempts = Mapping[tuple[str, int], Record]
"""Records by case id and number of the attempt."""

WHOLE = "whole"
MEMORY = "peak_memory"


@dataclass(kw_only=True, slots=True)
class Sides:
    """The two sides of a comparison: a frame each, and the key that pairs their rows."""

    names: tuple[str, str]
    frames: tuple[pd.DataFrame, pd.DataFrame]
    """One frame for each side, whose column ``pair`` is equal for the two sides of one case."""


def main(arguments: list[str] | None = None) -> int:
    """Compare, write table and figure, print a summary.

    Returns:
        0, or 1 where something regressed beyond the bound, or 2 where the command is wrong.
    """
    options = _parser().parse_args(arguments)
    try:
        sides = _sides(options.a, options.b, options.folder, options.sweep)
        rows = compared(sides, options.metric, options.same / 100)
    except ValueError as error:
        return complain(error, COMMAND)
    differing = differences(sides)
    table = comparison_table(rows, sides.names, options.metric, differing)
    paths: list[Path] = []
    if options.output is not None:
        try:
            drawn = draw_comparison(rows, sides.names, options.bound, differing)
            paths = _write(table, drawn, options.output)
        except OSError as error:
            return complain(f"--output={options.output}: cannot be written ({error})", COMMAND)
    console = PrintableConsole(soft_wrap=False)
    shown, elsewhere = for_terminal(rows)
    if len(shown):
        printed = comparison_table(shown, sides.names, options.metric, differing)
        render_terminal(printed, console, has_files=bool(paths))
    if elsewhere:
        say(elsewhere if paths else f"{elsewhere} --output FOLDER writes all rows and a figure.")
    for path in paths:
        say(f"  {path}")
    regressed = regressions(rows, options.bound) if options.bound is not None else rows.iloc[:0]
    totals = [frame["pair"].nunique() for frame in sides.frames]
    say(summary(rows, sides.names, (totals[0], totals[1]), options.bound, len(regressed)))
    return 1 if len(regressed) else 0


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="attnbench-compare",
        description="Compare B with A, case by case: two results folders, or two git revisions or "
        "two attention backends of one folder. Nothing is measured, and records are only read.",
    )
    parser.add_argument("a", metavar="A", help="the baseline")
    parser.add_argument("b", metavar="B", help="what is compared with it")
    parser.add_argument(
        "--in",
        dest="folder",
        type=Path,
        metavar="RESULTS",
        help="the results folder that holds both revisions or backends",
    )
    parser.add_argument(
        "--metric",
        default=WHOLE,
        help=f"{WHOLE} (the default: the whole step, or all passes of attention), a phase such as "
        f"forward or backward, or {MEMORY}",
    )
    parser.add_argument(
        "--bound",
        type=_percent,
        metavar="PERCENT",
        help="exit with 1 where a case is SLOWER by more than this, or has no result any more",
    )
    parser.add_argument(
        "--same",
        type=_percent,
        default=100 * EQUIVALENCE,
        metavar="PERCENT",
        help="SAME where the whole interval is closer than this, FASTER and SLOWER where all of it "
        "is beyond (default: %(default)g)",
    )
    parser.add_argument(
        "--sweep", metavar="NAME", help="compare the cases of this sweep alone, such as leaderboard"
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FOLDER",
        help="write the whole table (CSV, Markdown, LaTeX) and a figure there",
    )
    return parser


def _percent(text: str) -> float:
    try:
        value = float(text.removesuffix("%"))
    except ValueError:
        value = -1.0
    if not 0 <= value < 1000:
        raise argparse.ArgumentTypeError(f"{text}: must be a percentage of at least 0, such as 5")
    return value


def _sides(a: str, b: str, folder: Path | None, sweep: str | None) -> Sides:
    """The two sides that A and B name; ValueError in one line where they name nothing."""
    if folder is None:
        missing = [(name, path) for name, path in (("A", a), ("B", b)) if not Path(path).is_dir()]
        if missing:
            name, path = missing[0]
            raise ValueError(
                f"{name}={path}: no such results folder; name the folder of two revisions or "
                "backends with --in RESULTS"
            )
        return _of_folders(Path(a), Path(b), sweep)
    records = _load(folder, "--in", sweep)
    revisions = sorted({str(record.environment.get("git_revision")) for record in records.values()})
    chosen = [_revision(text, revisions) for text in (a, b)]
    if a == b or (chosen[0] and chosen[0] == chosen[1]):
        raise ValueError(f"A={a} and B={b}: are one, whose records are equal to themselves")
    if chosen[0] and chosen[1]:
        parts = [_counting(records, revision) for revision in chosen if revision]
        parts = [part.assign(pair=part["case_id"]) for part in parts]
        return Sides(names=(a, b), frames=(parts[0], parts[1]))
    frame = _counting(records)
    backends = sorted(frame["attention"].unique())
    for key, text in (("A", a), ("B", b)):
        if text not in backends:
            raise ValueError(
                f"{key}={text}: neither a git revision nor an attention backend in {folder}; "
                f"revisions: {', '.join(revisions)}; backends: {', '.join(backends)}"
            )
    frame = frame.assign(pair=point_groups(frame, ["attention"]))
    one, other = (frame[frame["attention"] == text] for text in (a, b))
    return Sides(names=(a, b), frames=(one, other))


def _of_folders(a: Path, b: Path, sweep: str | None) -> Sides:
    if a.samefile(b):
        raise ValueError(f"A={a} and B={b}: are one folder, whose records are equal to themselves")
    names = (a.name, b.name) if a.name != b.name else (str(a), str(b))
    frames = [_counting(_load(path, key, sweep)) for key, path in (("A", a), ("B", b))]
    frames = [frame.assign(pair=frame["case_id"]) for frame in frames]
    return Sides(names=names, frames=(frames[0], frames[1]))


def _load(results: Path, key: str, sweep: str | None) -> Attempts:
    """Every readable attempt of a folder, or of a sweep of it; one line if there are none."""
    if not results.is_dir():
        raise ValueError(f"{key}={results}: no such folder")
    records, problems = load_attempts(RecordStore(results))
    for problem in problems:
        warn(f"{problem}; left out", command=COMMAND)
    if not records:
        raise ValueError(f"{key}={results}: holds no readable records (records/*.json)")
    if sweep is None:
        return records
    known = planned_labels(results)
    if sweep not in known:
        raise ValueError(
            f"--sweep={sweep}: {results} has no such sweep{did_you_mean(sweep, known)}; there are "
            f"{', '.join(known) or 'none'}"
        )
    chosen = set(read_plan(results, sweep).case_ids)
    return {key: record for key, record in records.items() if record.case_id in chosen}


def _revision(text: str, revisions: Iterable[str]) -> str | None:
    """The one revision that begins with the text, as git abbreviates them."""
    found = [name for name in revisions if len(text) >= 4 and name.startswith(text)]
    return found[0] if len(found) == 1 else None


def _counting(attempts: Attempts, revision: str | None = None) -> pd.DataFrame:
    """The frame of the attempts that count, of one revision if given."""
    chosen = Records(
        {
            key: record
            for key, record in attempts.items()
            if revision is None or record.environment.get("git_revision") == revision
        }
    )
    return build_frame(chosen.values(), later=chosen.later)


def compared(sides: Sides, metric: str, same_within: float = EQUIVALENCE) -> pd.DataFrame:
    """One row per pair: both values, ratio A over B, its interval, and the ``outcome``.

    The outcome is FASTER, SLOWER, SAME or UNCLEAR (LESS, MORE or SAME of memory), or ``lost``
    and ``gained`` where only one side has a result, or None where neither has.

    Raises:
        ValueError: where nothing can be paired, or no case has the metric.
    """
    chosen = [_measured(frame, metric) for frame in sides.frames]
    common = set(chosen[0]["pair"]) & set(chosen[1]["pair"])
    if not common:
        raise ValueError(
            f"{sides.names[0]} and {sides.names[1]}: no case in common "
            f"({len(chosen[0])} and {len(chosen[1])} cases)"
        )
    one, other = (frame.drop_duplicates("pair").set_index("pair") for frame in chosen)
    order = [pair for pair in one.index if pair in common]
    sides_of_case = one.loc[order], other.loc[order]
    rows = paired(*sides_of_case, has_samples=metric != MEMORY, same_within=same_within)
    return rows.reset_index(drop=True).assign(same_within=same_within)


def differences(sides: Sides) -> list[str]:
    """The compared point columns: those in which the sides of any pair differ."""
    one, other = (frame.drop_duplicates("pair").set_index("pair") for frame in sides.frames)
    common = one.index.intersection(other.index)
    one, other = one.loc[common], other.loc[common]
    names = [name for name in POINTS if name in one and name in other]
    return [
        name
        for name in names
        if ((one[name] != other[name]) & (one[name].notna() | other[name].notna())).any()
    ]


def _measured(frame: pd.DataFrame, metric: str) -> pd.DataFrame:
    """The rows that hold the metric, with its value as ``value``."""
    if metric == MEMORY:
        rows = frame.drop_duplicates("case_id")
        return rows.assign(value=rows["peak_memory_gib"].where(rows["status"] == "ok"))
    phases = sorted(frame["phase"].unique())
    rows = fullest_phase(frame) if metric == WHOLE else frame[frame["phase"] == metric]
    if rows.empty:
        raise ValueError(
            f"--metric={metric}: no case has it; one of {', '.join([WHOLE, *phases, MEMORY])}"
        )
    return rows.assign(value=rows["median_ms"])


def regressions(rows: pd.DataFrame, bound: float) -> pd.DataFrame:
    """Rows that are SLOWER (or need MORE) by more than ``bound`` percent, or have no result now."""
    worse = rows["outcome"].isin(["SLOWER", "MORE"]) & (1 / rows["ratio"] - 1 > bound / 100)
    return rows[worse | (rows["outcome"] == "lost")]


CAPTION = (
    "{b} against {a}, case by case. Ratio: {what} of {a} over that of {b}, so that more than 1 is "
    "better{interval}."
)


def comparison_table(
    rows: pd.DataFrame,
    names: tuple[str, str],
    metric: str,
    differing: Iterable[str] = (),
) -> Table:
    """The rows of :func:`compared` as a table.

    Args:
        differing: point columns of which either side has its own value, so that no row has one.
    """
    memory = metric == MEMORY
    unit, what = ("GiB", "peak memory") if memory else ("ms", "time")
    interval = "" if memory else f", with {rule_words(rows)}"
    caption = CAPTION.format(a=names[0], b=names[1], what=what, interval=interval)
    ends = () if memory else ("ratio_low", "ratio_high")
    rows = rows.assign(
        mark=marks_of(rows),
        interval=interval_cells(rows, digits=3),
        host_mark=host_marks(rows["machine"], rows["a_machine"]),
    )
    if not memory:
        rows = rows.assign(why=reasons(rows))
    several = rows["phase"].nunique() > 1
    phase = [Column(key="phase", header="phase", point=True)] if several else []
    built = make_table(
        caption=caption,
        rows=rows,
        lead=["task", "model", "attention"],
        keep=["attention"] if rows["attention"].nunique() > 1 else [],
        without=differing,
        metrics=[
            *phase,
            Column(
                key="a_value",
                header=f"{names[0]} ({unit})",
                format=fmt.number,
                status="a_status",
                detail=True,
            ),
            Column(
                key="value",
                header=f"{names[1]} ({unit})",
                format=fmt.number,
                status="status",
                mark="mark",
                iqr=None if memory else "iqr_ms",
                detail=True,
            ),
            Column(key="ratio", header="ratio", format=_three_decimals, mark="host_mark"),
            Column(key="interval", header="interval", raw=ends, detail=True),
            Column(key="outcome", header="verdict"),
            Column(key="why", header="why", detail=True),
        ],
    )
    built.name = "comparison"
    return built


def _three_decimals(value: float) -> str:
    return f"{value:.3f}"


def _write(table: Table, drawn: CaptionedFigure | None, folder: Path) -> list[Path]:
    paths: list[Path] = []
    for suffix, convert in {"csv": to_csv, "md": to_markdown, "tex": to_latex}.items():
        put(folder / f"comparison.{suffix}", convert(table).encode(), paths)
    for suffix in ("png", "svg", "pdf"):
        data = None if drawn is None else save(drawn, suffix)
        put(folder / f"comparison.{suffix}", data, paths)
    return paths


if __name__ == "__main__":
    sys.exit(main())
