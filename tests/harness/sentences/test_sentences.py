"""Each computed sentence, derived once more from its table and the rounds behind it."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
from records import (
    audit_examples,
    decode_examples,
    in_rounds,
    make_record,
    profile_examples,
    split_examples,
    strategy_examples,
)

from harness.analysis.frame import build_frame
from harness.analysis.row_verdicts import row_verdicts
from harness.cases import format as fmt
from harness.cases.columns import OBSERVED, POINTS
from harness.render.table import FINDINGS, Table, build_table, finding_of
from harness.store.record import Record, RecordStore
from harness.store.sweep_plan import planned_labels, read_plan

RESULTS = Path(__file__).parents[3] / "results"

RANKINGS = {
    "summary": ("attention", ("step",)),
    "attention_summary": ("attention", ("forward_backward", "forward")),
    "leaderboard": ("attention", ("forward_backward", "forward")),
    "data_parallel": ("strategy", ("step",)),
    "decode_latency": ("attention", ("decode",)),
}
"""Tables that say who is fastest: the choice that they rank, and the phase, the fullest first."""

CHECKED = ("short_sequences", "leaderboard", "ddp_overlap", "quickstart", "strategy_scaling")
"""Committed sweeps whose every table is derived again; together they rank in each way."""


def attention(name: str, ms: float, **fields: object) -> Record:
    samples = {"forward_backward": [[0.999 * ms, ms, 1.001 * ms]]}
    fields = {"task": "attention", "mode": "forward_backward"} | fields
    return in_rounds(make_record(attention=name, samples_ms=samples, **fields))  # type: ignore[arg-type]


def ranked() -> list[Record]:
    """A clear winner, a tie, and a point of one round, in two precisions."""
    one_round = [
        make_record(
            attention=name,
            task="attention",
            mode="forward_backward",
            seq_len=4096,
            samples_ms={"forward_backward": [[ms] * 3]},
        )
        for name, ms in (("naive", 50.0), ("sdpa", 40.0))
    ]
    return [
        *(attention(name, ms) for name, ms in (("naive", 30.0), ("sdpa", 20.0), ("flex", 25.0))),
        *(
            attention(name, ms, seq_len=1024)
            for name, ms in (("naive", 30.0), ("sdpa", 20.0), ("flex", 20.01))
        ),
        *(attention(name, ms, precision="fp32") for name, ms in (("naive", 30.0), ("sdpa", 40.0))),
        *one_round,
    ]


@cache
def frames() -> dict[str, pd.DataFrame]:
    """Examples for every table, in one round and in several."""
    kinds = {
        "ranked": ranked,
        "split": lambda: [*split_examples(), *audit_examples()],
        "strategies": strategy_examples,
        "profiles": profile_examples,
        "decoding": decode_examples,
    }
    found = {name: build_frame(make()) for name, make in kinds.items()}
    for name in ("split", "strategies", "decoding"):
        found[f"{name} in rounds"] = build_frame(map(in_rounds, kinds[name]()))
    return found


@cache
def committed() -> dict[str, tuple[tuple[str, ...], pd.DataFrame]]:
    """The names of the tables and the frame of each checked sweep that is committed."""
    found = {}
    for folder in sorted(RESULTS.glob("*/sweeps")):
        labels = [label for label in planned_labels(folder.parent) if label in CHECKED]
        records = RecordStore(folder.parent).load()[0] if labels else {}
        for label in labels:
            plan = read_plan(folder.parent, label)
            mine = [records[case_id] for case_id in plan.case_ids if case_id in records]
            found[f"{folder.parent.name}/{label}"] = (tuple(plan.tables), build_frame(mine))
    return found


@cache
def built() -> list[tuple[str, Table, pd.DataFrame]]:
    """Every table of the examples and of the committed sweeps, with its name and frame."""
    found = []
    everywhere = {name: (tuple(FINDINGS.names()), frame) for name, frame in frames().items()}
    for source, (names, frame) in {**everywhere, **committed()}.items():
        for name in names:
            if name in FINDINGS and (table := build_table(name, frame)) is not None:
                found.append((f"{source} {name}", table, frame))
    return found


class TestRankings:
    """Who is first, by the frame's own rounds rather than by what the table carried along."""

    def test_every_ranking_sentence(self) -> None:
        checked = 0
        for where, table, frame in built():
            if table.name in RANKINGS:
                checked += 1
                assert claims(finding_of(table)) == derived(table, frame), where
        assert checked >= 8

    def test_examples_have_every_outcome(self) -> None:
        table = build_table("attention_summary", frames()["ranked"])
        assert table is not None
        assert finding_of(table).startswith(
            "naive is fastest in fp32, by 33% over the next; sdpa is fastest at 1 of 3 points in "
            "bf16, by 25% over the next, sdpa and flex are level at 1, and at 1 it cannot be told "
            "(only 1 round)"
        )

    def test_a_leader_of_one_round_is_none(self) -> None:
        rows = frames()["ranked"]
        table = build_table("attention_summary", rows[rows["seq_len"] == 4096])
        assert table is not None
        said = finding_of(table)
        assert said == "Which of sdpa and naive is fastest cannot be told (only 1 round)."


def derived(table: Table, frame: pd.DataFrame) -> Counter[tuple[str, ...]]:
    """The outcomes at the table's points: ``(first,)``, those that are level, or ``()``."""
    choice, phases = RANKINGS[table.name]
    rows = frame[frame["case_id"].isin(table.rows["case_id"]) & frame["phase"].isin(phases)]
    order = rows["phase"].map({phase: place for place, phase in enumerate(phases)})
    rows = rows.assign(order=order).sort_values("order", kind="stable")
    rows = rows[rows["median_ms"].notna()].drop_duplicates("case_id")
    if table.name == "leaderboard":
        direct = rows[~rows["call_compiled"].astype(bool)]
        # A sweep of calls through torch.compile alone ranks these.
        rows = rows if direct.empty else direct
    keys = [name for name in POINTS if name in rows and name not in (choice, *OBSERVED)]
    found: Counter[tuple[str, ...]] = Counter()
    for _, point in rows.groupby([*keys, "task"], dropna=False):
        if len(point) < 2:
            continue
        if choice == "attention" and point["host_bound"].eq(True).any():
            continue
        point = point.sort_values("median_ms", kind="stable")
        best = pd.concat([point.iloc[:1]] * (len(point) - 1))
        words = row_verdicts(best, point.iloc[1:])["verdict"].tolist()
        if point["impossible"].map(bool).any():
            continue
        names = [str(name) for name in point[choice]]
        if set(words) <= {"SLOWER"}:
            found[(names[0],)] += 1
        elif set(words) <= {"SLOWER", "SAME"}:
            alike = [name for name, word in zip(names[1:], words, strict=True) if word == "SAME"]
            found[tuple(sorted([names[0], *alike]))] += 1
        else:
            found[()] += 1
    return found


def claims(sentence: str) -> Counter[tuple[str, ...]]:
    """The outcomes that a sentence claims, as its words say them."""
    found: Counter[tuple[str, ...]] = Counter()
    for part in sentence.rstrip(".").split("; "):
        if match := re.match(r"(?:W|w)hich.* is fastest.* cannot be told(?: at (.*))?", part):
            found[()] += _count(match[1] or "1")
            continue
        for clause in re.split(r", (?=and at |\S+ at \d|\S+ (?:and \S+ )+are level|\S+, )", part):
            if match := re.match(r"(?:and )?at (\d+) it cannot be told", clause):
                found[()] += int(match[1])
            elif match := re.match(r"(\S+) is fastest(?: at (.*? points?))?", clause):
                found[(match[1],)] += _count(match[2] or "1")
            elif match := re.match(r"(.*) are level(?: at (\S+(?: of \d+ points)?))?", clause):
                names = re.split(r", | and ", match[1])
                found[tuple(sorted(names))] += _count(match[2] or "1")
            elif match := re.match(r"(\S+) at (\d+)$", clause):
                found[(match[1],)] += int(match[2])
    return found


def _count(words: str) -> int:
    """How many points: ``5 of 6 points``, ``both points``, ``any of 3 points``, and the like."""
    if words.startswith(("both", "either")):
        return 2
    return int(re.search(r"\d+", words)[0])  # type: ignore[index]


class TestNumbers:
    """Every ratio and share in a sentence is in its table, or derived from two columns."""

    def test_every_number(self) -> None:
        checked = 0
        for where, table, numbers in self.stated():
            known = known_numbers(table)
            for number in numbers:
                checked += 1
                assert number in known, f"{where}: {number} in {finding_of(table)!r}"
        assert checked > 60

    def test_other_numbers_are_found_out(self) -> None:
        """Most numbers that are a third larger are in no table: the check can tell them."""
        caught = total = 0
        for _, table, numbers in self.stated():
            known = known_numbers(table)
            for number in numbers:
                changed = 1.37 * float(number[:-1].replace(",", "")) + 0.013
                other = fmt.factor(changed) if number[-1] == fmt.TIMES else f"{changed:.0f}%"
                total += 1
                caught += other not in known
        assert caught > 0.65 * total

    def stated(self) -> list[tuple[str, Table, list[str]]]:
        return [
            (where, table, numbers)
            for where, table, _ in built()
            if table.name not in APART and (numbers := numbers_of(finding_of(table)))
        ]


APART = ("fp16_range", "kv_memory")
"""Tables whose sentences divide values of two rows; tests of their own compute them."""


def numbers_of(sentence: str) -> list[str]:
    """The factors and percentages in a sentence, as they are written."""
    rest = re.sub(r"by (a factor of )?\S+ over the next|within 5%", "", sentence)
    return re.findall(rf"(?<![\w.,-])[\d.,]*\d[{fmt.TIMES}%]", rest)


def known_numbers(table: Table) -> set[str]:
    """Factors and percentages that the table gives: its values, ratios of times, medians."""
    rows = table.rows
    shown = {key for column in table.columns for key in (column.key, column.spread)}
    shown |= {name for name in rows if str(name).endswith("_share") or name in UNSHOWN}
    rows = rows.assign(  # such a cell says UNCLEAR where there is no number
        **{
            name: pd.to_numeric(rows[name], errors="coerce")
            for name in rows
            if str(name).endswith("_cell")
        }
    )
    numeric = rows[[name for name in rows if name in shown]].select_dtypes("number").astype(float)
    times = numeric.filter(regex="(_ms|_mib|ranks|busy|predicted_mib)$")
    with np.errstate(all="ignore"):
        ratios = [times.div(times[name], axis=0).add_suffix(f"/{name}") for name in times]
        everything = pd.concat([numeric, *ratios], axis=1)
        values = [everything.to_numpy().ravel(), everything.median().to_numpy()]
        for keys in (["scheme"], ["layout", "attention"], ["split"]):
            if set(keys) <= set(rows):
                groups = everything.groupby([rows[key] for key in keys], dropna=False)
                values += [groups.median().to_numpy().ravel()]
        flat = np.concatenate(values)
        flat = np.concatenate([flat, 1 / flat, np.abs(flat)])
    if {"ranks", "busy", "split"} <= set(rows):
        parts = rows.groupby("split")
        idle = 1 - parts["busy"].sum() / parts["ranks"].sum()
        flat = np.concatenate([flat, idle.to_numpy()])
    if {"rank", "pair", "split"} <= set(rows):
        means = rows.groupby(["split", "rank"])["pair"].mean().unstack()
        flat = np.concatenate([flat, (means.iloc[:, -1] / means.iloc[:, 0]).to_numpy()])
    found: set[str] = set()
    for value in np.unique(flat[np.isfinite(flat)]):
        found |= {fmt.factor(value), f"{100 * value:.0f}%", f"{100 * value:.1f}%"}
        found.add(f"{fmt.number(value)}{fmt.TIMES}")
    return found


UNSHOWN = ("ranks", "exposed_share", "output_elements")
