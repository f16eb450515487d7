"""Tables with one column per backend, each cell holding the numbers of several phases."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from harness.analysis.comparison import host_marks
from harness.analysis.machines import Machine
from harness.cases import format as fmt
from harness.cases.columns import POINTS, point_groups, sorted_values
from harness.render.rows import apart_from_unsupported
from harness.render.table import Column, Table, make_table

SPREAD = "In brackets: interquartile range over median, the largest of the cell's times."


def table_by_backend(
    cases: pd.DataFrame,
    *,
    caption: str,
    phases: Sequence[str],
    value: str,
    unit: str,
    lead: Sequence[str],
    keep: Sequence[str],
) -> Table:
    """One row per measured point, one column per backend: ``0.12 / 0.31 / 0.43 (1.5%)``.

    The brackets hold the largest spread of the cell's phases.

    Args:
        cases: from :func:`harness.render.rows.per_case`, with ``{phase}_{value}`` and
            ``{phase}_median_ms`` of every phase.
        phases: in the order of a cell's numbers.
        unit: of all of them, for the header.
        lead: point columns to show first; keep: even where all rows agree.
    """
    cases, footnotes = apart_from_unsupported(cases)
    group = point_groups(cases, ["attention"])
    cases = cases.assign(mark=cases["mark"] + _other_host_marks(cases, group))
    names = [name for name in POINTS if name != "attention" and name in cases]
    rows = cases.assign(group=group).drop_duplicates("group").set_index("group")[names]
    columns = []
    for attention in sorted_values(cases, "attention"):
        chosen = cases["attention"] == attention
        part = cases[chosen].set_index(group[chosen])
        part = part[~part.index.duplicated()].reindex(rows.index)
        keys = [f"{phase}_{value}" for phase in phases]
        rows = pd.concat([rows, _values(part, attention, keys, phases)], axis=1)
        columns.append(
            Column(
                key=attention,
                header=f"{attention} ({unit})",
                # Not text: numbers are aligned to the right.
                format=str,
                status=f"{attention}_status",
                mark=f"{attention}_mark",
                raw=tuple(
                    f"{attention}_{key}" for key in (*keys, *(f"{name}_iqr_ms" for name in phases))
                ),
                record=f"{attention}_case_id",
            )
        )
    table = make_table(
        caption=f"{caption} {SPREAD}",
        rows=rows.reset_index(drop=True),
        lead=lead,
        keep=keep,
        without=["attention"],
        metrics=columns,
    )
    table.footnotes += footnotes
    return table


def _other_host_marks(cases: pd.DataFrame, group: pd.Series) -> pd.Series:
    """The mark of each cell that was measured on another host than most of its row."""
    measured = cases.loc[cases["status"] == "ok", "machine"]
    usual = measured.groupby(group[measured.index]).agg(_most_common)
    marks = host_marks(measured, group[measured.index].map(usual))
    return pd.Series(marks, measured.index, dtype=object).reindex(cases.index, fill_value="")


def _most_common(machines: pd.Series) -> Machine:
    """The first of the machines that most of them may be."""
    found: list[Machine] = machines.tolist()
    return max(found, key=lambda one: sum(not one.is_other(machine) for machine in found))


def _values(
    part: pd.DataFrame, attention: str, keys: Sequence[str], phases: Sequence[str]
) -> pd.DataFrame:
    """The cells of one backend, their numbers for a CSV, statuses and marks."""
    ratios = [part[f"{name}_iqr_ms"] / part[f"{name}_median_ms"] for name in phases]
    spreads = pd.concat(ratios, axis=1).max(axis=1)
    numbers = part[list(keys)].itertuples(index=False)
    cells = [_cell(found, spread) for found, spread in zip(numbers, spreads, strict=True)]
    return pd.DataFrame(
        {
            attention: pd.Series(cells, index=part.index, dtype=object),
            **{f"{attention}_{key}": part[key] for key in keys},
            **{f"{attention}_{name}_iqr_ms": part[f"{name}_iqr_ms"] for name in phases},
            **{f"{attention}_{name}_evidence": part[f"{name}_evidence"] for name in phases},
            f"{attention}_status": part["status"],
            f"{attention}_case_id": part["case_id"],
            f"{attention}_mark": part["mark"].fillna(""),
            **{f"{attention}_{kind}": part[kind] for kind in ("disturbed", "impossible")},
            f"{attention}_host_bound": part["host_bound"],
        }
    )


def _cell(numbers: Sequence[float], spread: float) -> str | None:
    """The numbers of one cell and their spread; None where there are none at all."""
    if all(map(fmt.is_missing, numbers)):
        return None
    texts = [fmt.ABSENT if fmt.is_missing(item) else fmt.number(item) for item in numbers]
    behind = "" if fmt.is_missing(spread) else f" ({fmt.rough_percent(spread)}%)"
    return f"{' / '.join(texts)}{behind}"
