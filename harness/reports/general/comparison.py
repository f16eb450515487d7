"""Each choice against its baseline: faster, slower, the same, or unclear.

Among cases equal in everything but the attention backend (or what torch.compile is applied
to, or how ranks train together), each is compared with the baseline: naive attention (or no
compilation, or PyTorch's DDP, and what else a strategy names as its peer). Where naive did not
finish, the next backend in the tables' order stands in, and the row names it.
"""

from __future__ import annotations

import pandas as pd

from harness.analysis.comparison import AXES, comparable, compare, compare_strategies, hides_kernels
from harness.analysis.row_verdicts import interval_cells, reasons, rule_words
from harness.cases import format as fmt
from harness.render.rows import marks_of
from harness.render.table import Column, Table, finding, make_table, table
from harness.sentences.findings import best_row, listed, sentence, span

CAPTION = (
    "Each candidate against its baseline. Ratio: time of the baseline over that of the candidate, "
    "so that above 1 is faster, with {rule}."
)


@table("comparison", default=70)
def build(frame: pd.DataFrame) -> Table | None:
    candidates = comparable(frame)
    by_attention = compare(candidates, AXES["attention"])
    by_compile = compare(candidates, AXES["compile_scope"]).assign(baseline="uncompiled")
    split = candidates[candidates["world_size"] > 1]
    by_strategy = compare_strategies(split)
    parts = [part for part in (by_attention, by_compile, by_strategy) if not part.empty]
    if not parts:
        return None
    kept = {"attention": by_attention, "compile_scope": by_compile, "strategy": by_strategy}
    rows = pd.concat(parts, ignore_index=True)
    rows["mark"] = marks_of(rows)
    rows["baseline_mark"] = rows["baseline_host_bound"].map({True: fmt.DOUBLE_BAR, False: ""})
    rows["interval"] = interval_cells(rows)
    rows["why"] = reasons(rows)
    phase = [Column(key="phase", header="phase")] if rows["phase"].nunique() > 1 else []
    return make_table(
        caption=CAPTION.format(rule=rule_words(rows)),
        rows=rows,
        lead=["model", "head_dim", "seq_len", "attention", "compile_scope"],
        keep=[name for name, part in kept.items() if not part.empty],
        order=["task", "model", "precision", "batch_size", "head_dim", "seq_len", "attention"],
        metrics=[
            *phase,
            Column(
                key="median_ms",
                header="median (ms)",
                format=fmt.number,
                status="status",
                mark="mark",
                iqr="iqr_ms",
                detail=True,
            ),
            Column(key="baseline", header="baseline"),
            Column(
                key="baseline_ms",
                header="baseline (ms)",
                format=fmt.number,
                mark="baseline_mark",
                detail=True,
            ),
            Column(key="ratio", header="ratio", format=fmt.factor, mark="apart_mark"),
            Column(key="interval", header="interval", raw=("ratio_low", "ratio_high"), detail=True),
            Column(key="num_rounds", header="rounds", format=fmt.integer, detail=True),
            Column(key="verdict", header="verdict", status="status"),
            Column(key="why", header="why", detail=True),
        ],
    )


@finding("comparison")
def say(rows: pd.DataFrame) -> str | None:
    counts = rows["verdict"].value_counts()
    if counts.empty:
        return None
    ranked = rows[(rows["axis"] != "attention") | ~hides_kernels(rows)]
    faster = ranked[ranked["verdict"] == "FASTER"]
    if faster.empty:
        return sentence(_counts(counts))
    best = best_row(faster, "ratio")
    name = str(best[best["axis"]])
    if best["axis"] == "compile_scope":
        name = f"{best['attention']} compiled by {name}"
    lead = f"{name} is FASTER than {best['baseline']} by {fmt.factor(best['ratio'])}"
    if len(faster) > 1:
        lead = f"the FASTER ones by {span(faster['ratio'])}, most {name} over {best['baseline']}"
    return sentence(_counts(counts) if len(ranked) > 1 else None, lead)


def _counts(counts: pd.Series) -> str:
    """How many candidates have which verdict."""
    total = int(counts.sum())
    if set(counts.index) == {"UNCLEAR"}:
        pairs = "the one pair is" if total == 1 else f"all {total} pairs are"
        return f"{pairs} UNCLEAR: none can be told from its baseline"
    words = {"FASTER": "FASTER than its baseline", "SLOWER": "SLOWER", "SAME": "the SAME"}
    words["UNCLEAR"] = "UNCLEAR"
    parts = []
    for word, text in words.items():
        number = int(counts.get(word, 0))
        parts.append(f"{number or 'none'} {'is' if number == 1 else 'are'} {text}")
    told = listed(parts).replace("are FASTER than its", "are FASTER than their")
    return f"of {fmt.counted(total, 'candidate')} {told}"
