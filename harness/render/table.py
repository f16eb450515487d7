"""Tables: columns over the rows of a frame, and the text of their cells.

A table is one file in ``harness/reports`` with a caption and a ``build(frame)``. Columns that
name the measured point (model, precision, sequence length, ...) are handled here, the same
way for every table: those that are equal in all rows move into the caption, so that tables
stay narrow, and those that vary are always shown, so that no two rows look alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import pandas as pd

from harness.analysis import disturbance, likeness, overtaken, physics
from harness.cases import format as fmt
from harness.cases.columns import POINTS, caption_of, redundant_points, sort_by_points
from harness.render.case_notes import hosts, reasons, revisions
from harness.render.registries import TABLES
from kernels.registry import Registry

DISTURBED = f"{fmt.DAGGER} Disturbed while it was measured"
"""Followed by each disturbance that occurs in the table, and its meaning."""
IMPOSSIBLE = f"{fmt.CIRCLED_SLASH} Impossible, so that no rate or share follows from it"
"""Followed, as above, by each reason and its meaning."""
UNLIKE = (
    f"{fmt.STAR} Measured unlike what it is compared with, so that the ratio is not that of the "
    "work alone"
)
"""Followed, as above, by each difference and its meaning."""

SLOW_START = (
    f"{fmt.SECTION} A first pass took over 1.2 times the median, which mean and standard "
    "deviation carry."
)
RECOMPILED = f"{fmt.DOUBLE_DAGGER} torch.compile compiled again inside the measured passes."
HOST_BOUND = (
    f"{fmt.DOUBLE_BAR} The device waited for its host over 5% of the time: this is the host's "
    "time, and does not rank kernels."
)
APART = (
    f"{fmt.PILCROW} Measured over ten minutes apart from what it is compared with: clocks, and "
    "even hosts, may differ."
)
STALE = f"{fmt.DIAMOND} Measured with other kernels, model code or schemes than those of now."
ALL_STALE = (
    "All values here were measured with other kernels, model code or schemes than those of now."
)
OTHER_HOST = f"{fmt.TRIANGLE} Measured on another host than what it is compared with."
OVERTAKEN = f"{fmt.OPEN_TRIANGLE_DOWN} A newer attempt gave no result"
"""Followed, as above, by how it ended."""
NOTES = (
    *(DISTURBED, RECOMPILED, HOST_BOUND, SLOW_START, APART, STALE, OVERTAKEN, OTHER_HOST),
    *(UNLIKE, IMPOSSIBLE),
)
"""Footnotes, each behind its symbol, in the order in which tables repeat those that occur."""

REASONS = {
    DISTURBED: ("disturbed", disturbance.MEANINGS),
    IMPOSSIBLE: ("impossible", physics.MEANINGS),
    OVERTAKEN: ("overtaken", overtaken.MEANINGS),
    UNLIKE: ("unlike", likeness.MEANINGS),
}
"""Notes that say in which words, of which of the rows' columns, their mark is meant."""

SPREAD = "Spread: interquartile range over median"
"""The caption's words on the column of that name."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Column:
    """One column: where its values lie, and how its header and cells read."""

    key: str
    header: str
    """The header, with the unit: ``forward (ms)``."""
    format: fmt.Format = fmt.text
    group: str = ""
    """Shared heading above neighbouring columns."""
    spread: str | None = None
    """Key of a standard deviation shown behind the value."""
    status: str | None = None
    """Key of the status that is spelled out where the value is missing."""
    mark: str | None = None
    """Key of the symbols of footnotes that belong to the value, such as ``forward_mark``; the
    words for them are then in ``forward_disturbed``, or else in ``disturbed``, and so on."""
    iqr: str | None = None
    """Key of the interquartile range, in the unit of the value; the table's spread column shows the
    largest of them over their values, row by row."""
    raw: tuple[str, ...] = ()
    """Keys that a CSV gives in place of the text that ``key`` holds."""
    point: bool = False
    """Says what was measured, rather than a result."""
    detail: bool = False
    """First to go where a terminal is too narrow."""
    record: str = "case_id"
    """Key of the case whose record holds the value."""

    @property
    def align(self) -> str:
        return "left" if self.format is fmt.text else "right"

    @property
    def full_header(self) -> str:
        return f"{self.group} {self.header}".strip()

    def words_key(self, kind: str, rows: pd.DataFrame) -> str | None:
        """Where the rows say why the value is ``disturbed`` or ``impossible``; None if nowhere."""
        if self.mark is None:
            return None
        return next((key for key in (self.mark.replace("mark", kind), kind) if key in rows), None)


@dataclass(kw_only=True, slots=True)
class Table:
    """Rows, columns and words, ready to be written in any format."""

    name: str = ""
    caption: str
    columns: list[Column]
    rows: pd.DataFrame
    footnotes: list[str] = field(default_factory=list)
    is_listing: bool = False
    """Lists every measurement for a reader who searches, and is not printed beside other tables."""
    _cells: list[list[str]] | None = None

    def cells(self) -> list[list[str]]:
        """The text of every cell, row by row; formatted once, written many times."""
        if self._cells is None:
            texts = [self._column_cells(column) for column in self.columns]
            self._cells = [list(row) for row in zip(*texts, strict=True)]
        return self._cells

    def _column_cells(self, column: Column) -> list[str]:
        values = self.rows[column.key].tolist()
        absent = [fmt.ABSENT] * len(values)
        if column.status is not None:
            statuses = self.rows[column.status].tolist()
            absent = [fmt.STATUS_WORDS.get(status, fmt.ABSENT) for status in statuses]
        spreads = self.rows[column.spread].tolist() if column.spread else None
        marks = self.rows[column.mark].tolist() if column.mark else None
        result = []
        for index, value in enumerate(values):
            if fmt.is_missing(value):
                withheld = marks is not None and fmt.CIRCLED_SLASH in marks[index]
                result.append(absent[index] + (fmt.CIRCLED_SLASH if withheld else ""))
                continue
            if spreads is not None:
                cell = fmt.with_spread(value, spreads[index])
            else:
                cell = column.format(value)
            result.append(cell + marks[index] if marks is not None else cell)
        return result


table = TABLES.register

Finding = Callable[[pd.DataFrame], str | None]

FINDINGS: Registry[Finding] = Registry(
    "finding", decorator="finding", packages=("harness.reports",)
)

finding = FINDINGS.register
"""Decorator: the function that says in one sentence what the table of this name shows.

It is given the rows of the built table; None where they hold nothing worth a sentence.
"""


def finding_of(table: Table) -> str:
    """The sentence for a built table; empty where there is none."""
    if table.name not in FINDINGS or table.rows.empty:
        return ""
    return FINDINGS[table.name].target(table.rows) or ""


def build_table(name: str, frame: pd.DataFrame) -> Table | None:
    """The table ``name`` over the frame; None where the frame has nothing for it."""
    if frame.empty:
        return None
    built: Table | None = TABLES[name].target(frame)
    if built is not None:
        built.name = name
        _say_once_what_all_share(built)
        cases = _measured_cases(built, frame)
        built.footnotes += [*reasons(cases), *revisions(cases), *hosts(cases)]
    return built


def _say_once_what_all_share(built: Table) -> None:
    """Where every value is of other code than now, one sentence says so, and no value is marked."""
    if STALE not in built.footnotes:
        return
    columns = [column for column in built.columns if column.mark is not None]
    values = [
        built.rows.loc[built.rows[column.key].notna(), str(column.mark)] for column in columns
    ]
    if not all(marks.str.contains(fmt.DIAMOND, regex=False).all() for marks in values):
        return
    keys = {str(column.mark) for column in columns}
    built.rows = built.rows.assign(
        **{key: built.rows[key].str.replace(fmt.DIAMOND, "", regex=False) for key in keys}
    )
    built.footnotes[built.footnotes.index(STALE)] = ALL_STALE


def _measured_cases(built: Table, frame: pd.DataFrame) -> pd.DataFrame:
    """One row of the frame for each case that the table shows, in whichever column, if it ran."""
    keys = {"case_id", *(column.record for column in built.columns)} & set(built.rows.columns)
    shown = {case_id for key in keys for case_id in built.rows[key]}
    cases = frame.drop_duplicates("case_id")
    return cases[cases["case_id"].isin(shown) & (cases["status"] != "unsupported")]


def make_table(
    *,
    caption: str,
    rows: pd.DataFrame,
    metrics: Iterable[Column],
    lead: Iterable[str] = (),
    keep: Iterable[str] = (),
    without: Iterable[str] = (),
    order: Iterable[str] | None = None,
) -> Table:
    """A table of one measured point per row.

    Args:
        rows: has the point columns of :data:`harness.cases.columns.POINTS`, and ``metrics``.
        lead: point columns to show first; the others that vary follow.
        keep: point columns to show even where all rows agree.
        without: point columns that this table spreads over its columns, or does without.
        order: point columns to sort by, before all others; ``lead`` if not given.
    """
    lead, keep, without = list(lead), set(keep), set(without)
    without |= redundant_points(rows, lead)
    names = [*lead, *(name for name in POINTS if name not in lead)]
    names = [name for name in names if name in rows and name not in without]
    shown = [name for name in names if name in keep or POINTS[name].varies(rows[name])]
    stated = caption_of(rows, [name for name in names if name not in shown])
    order = lead if order is None else list(order)
    rows = sort_by_points(rows, [*order, *(name for name in names if name not in order)])
    columns = [
        Column(key=name, header=POINTS[name].header, format=POINTS[name].format, point=True)
        for name in shown
    ]
    shown_metrics = [column for column in metrics if _has_content(column, rows)]
    rows, shown_metrics = with_spread_column(rows, shown_metrics)
    columns += shown_metrics
    says_spread = _spread_sentence(columns)
    return Table(
        caption=" ".join(words for words in (caption, says_spread, stated) if words),
        columns=columns,
        rows=rows,
        footnotes=footnotes_of(rows, columns),
    )


def with_spread_column(
    rows: pd.DataFrame, columns: Sequence[Column]
) -> tuple[pd.DataFrame, list[Column]]:
    """The columns with one for the spread behind those that hold times, and its values in the rows.

    It shows the largest interquartile range over median of a row's times.
    """
    times = [column for column in columns if column.iqr]
    if not times:
        return rows, list(columns)
    ratios = [rows[column.iqr] / rows[column.key].astype(float) for column in times]
    rows = rows.assign(spread=pd.concat(ratios, axis=1).max(axis=1))
    if rows["spread"].isna().all():
        return rows, list(columns)
    last = times[-1]
    found = list(columns)
    place = max(
        index
        for index, column in enumerate(found)
        if column is last or (last.group and column.group == last.group)
    )
    found.insert(
        place + 1,
        Column(
            key="spread",
            header="spread (%)",
            format=fmt.rough_percent,
            record=last.record,
            detail=all(column.detail for column in times),
        ),
    )
    return rows, found


def _spread_sentence(columns: Sequence[Column]) -> str:
    """A caption's words on the spread column; empty where there is none."""
    if not any(column.key == "spread" for column in columns):
        return ""
    num_times = sum(bool(column.iqr) for column in columns)
    several = ", the largest of the row's times" if num_times > 1 else ""
    return f"{SPREAD}{several}."


def footnotes_of(rows: pd.DataFrame, columns: Sequence[Column]) -> list[str]:
    """What the marks of these columns mean, without those that no value has."""
    symbols = ""
    words: dict[str, set[str]] = {kind: set() for kind, _ in REASONS.values()}
    for column in columns:
        if column.mark is None:
            continue
        withheld = rows[column.mark].str.contains(fmt.CIRCLED_SLASH, regex=False)
        shown = rows[rows[column.key].notna() | withheld]
        symbols += "".join(shown[column.mark].unique())
        for kind, found in words.items():
            if key := column.words_key(kind, rows):
                found.update(word for some in shown[key] if isinstance(some, list) for word in some)
    return [_with_reasons(note, words) for note in NOTES if note[0] in symbols]


def _with_reasons(note: str, words: Mapping[str, set[str]]) -> str:
    if note not in REASONS:
        return note
    kind, meanings = REASONS[note]
    reasons = [f"{word} ({text})" for word, text in meanings.items() if word in words[kind]]
    return f"{note}: {'; '.join(reasons)}."


def _has_content(column: Column, rows: pd.DataFrame) -> bool:
    """Whether any row has a value, or a status to say why it has none."""
    if rows[column.key].notna().any():
        return True
    if column.status is None:
        return False
    return bool(rows[column.status].isin(list(fmt.STATUS_WORDS)).any())


def time_column(phase: str, header: str, *, group: str = "", detail: bool = False) -> Column:
    """The median time of a phase by :func:`per_case`; the status in words where there is none."""
    return Column(
        key=f"{phase}_median_ms",
        header=header,
        format=fmt.number,
        status=f"{phase}_status",
        mark=f"{phase}_mark",
        iqr=f"{phase}_iqr_ms",
        group=group,
        detail=detail,
    )
