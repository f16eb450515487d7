"""Every measured number of the README and of other pages is that of the committed records.

Tables and sentences stand in blocks, which must be as they follow from the records; some of them
are derived once more here, from the samples alone. Outside of blocks a page states no measured
number and ranks nothing: what is left are rules of the harness, held against their constants.
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from harness.analysis.host_time import NOTICEABLE_WAIT
from harness.analysis.run_to_run import ASSUMED
from harness.analysis.verdicts import EQUIVALENCE
from harness.cases.format import TIMES, number
from harness.commands.readme import PAGES, refreshed
from harness.commands.readme_blocks import filled, without_blocks
from harness.paths import ROOT
from harness.store.record import Record, RecordStore
from harness.store.sweep_plan import read_plan

BLOCK = re.compile(r"<!-- (?:table|finding|list): (\S+).*?-->\n(.*?)<!-- end -->", re.DOTALL)


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def filled_again(pages: dict[str, str]) -> dict[str, str]:
    """Pages with their blocks filled in a process of its own.

    Other tests register backends here, and change what hashes of the source are made of.
    """
    code = (
        "import json, sys; from harness.commands.readme import refreshed; "
        "pages = json.load(sys.stdin); "
        "json.dump({name: refreshed(text) for name, text in pages.items()}, sys.stdout)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, input=json.dumps(pages), cwd=ROOT, check=True, capture_output=True, text=True
    )
    return json.loads(done.stdout)


@functools.cache
def fresh_pages() -> dict[str, str]:
    return filled_again({page: read(page) for page in PAGES})


def fresh(page: str) -> str:
    return fresh_pages()[page]


WITH_BLOCKS = [page for page in PAGES if BLOCK.search(read(page))]

KEEP_A_LOG = {"docs/kernels.md"}
"""Pages that also tell of measurements on the way, which no record holds."""


class TestBlocks:
    @pytest.mark.parametrize("page", PAGES)
    def test_are_up_to_date(self, page: str) -> None:
        assert fresh(page) == read(page), "run python -m harness.commands.readme"

    def test_there_are_many(self) -> None:
        assert len(WITH_BLOCKS) > 7
        assert sum(len(BLOCK.findall(read(page))) for page in WITH_BLOCKS) > 45

    @pytest.mark.parametrize("page", WITH_BLOCKS)
    def test_a_number_changed_by_hand_is_found(self, page: str) -> None:
        """In each block, the last digit of each number in turn."""
        text, wanted = read(page), fresh(page)
        changed = 0
        for block in BLOCK.finditer(text):
            for digits in list(re.finditer(r"\d+", block[2]))[:20]:
                place = block.start(2) + digits.end() - 1
                other = str((int(text[place]) + 1) % 10)
                assert text[:place] + other + text[place + 1 :] != wanted
                changed += 1
        assert changed > 4

    def test_filling_takes_nothing_from_what_stood_there(self) -> None:
        """A block that held anything else is as it was after it is filled."""
        page = "results/README.md"
        emptied = re.sub(r"(-->\n)[^<]*(<!-- end -->)", r"\1nonsense: 1.23x\n\2", read(page))
        assert emptied != read(page)
        assert filled_again({page: emptied}) == {page: fresh(page)}

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ("rows: 3", "rows: one of where, columns"),
            ("columns: speed", "speed: one of the headers model; attention"),
            ("where: attention == 'none'", "hold nothing"),
            ("down: attention\nacross: attention\ncell: step (ms)", "narrow where"),
        ],
    )
    def test_mistakes_are_one_line(self, options: str, message: str) -> None:
        path = "results/cpu-2core/sweeps/quickstart/tables/summary.md"
        page = f"<!-- table: {path}\n{options}\n-->\n<!-- end -->"
        with pytest.raises(ValueError, match=re.escape(message)) as raised:
            refreshed(page)
        assert "\n" not in str(raised.value)
        assert path in str(raised.value)

    def test_text_around_blocks_is_kept(self) -> None:
        page = "Before 1.\n<!-- other: x -->\nAfter 2.\n"
        assert without_blocks(page) == page
        assert filled(page, ROOT, lambda *_: pytest.fail("asks for a frame")) == page


# Some blocks from samples alone


RESULTS = ROOT / "results" / "h200"


@functools.cache
def store() -> dict[str, Record]:
    return dict(RecordStore(RESULTS).load()[0])


def measured(sweep: str) -> Iterator[Record]:
    for case_id in read_plan(RESULTS, sweep).case_ids:
        if (record := store().get(case_id)) is not None and record.status == "ok":
            yield record


def slowest(record: Record, phase: str) -> float:
    """The median over passes of the longest time of any rank."""
    return median(map(max, zip(*record.phases[phase].samples_ms, strict=True)))


def rows_of(path: str, headers: str) -> list[dict[str, str]]:
    """The rows of the first block for a table with these headers, without marks."""
    for found, body in BLOCK.findall("\n".join(map(read, WITH_BLOCKS))):
        lines = [line for line in body.splitlines() if line.startswith("|")]
        if not lines or path not in found:
            continue
        cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
        if headers in cells[0]:
            return [
                {
                    name: re.sub("[†‡§¶‖◇△▽⋆⊘]", "", cell)
                    for name, cell in zip(cells[0], row, strict=True)
                }
                for row in cells[2:]
            ]
    raise AssertionError(f"no block shows {headers} of {path}")


def test_leaderboard() -> None:
    """Times of both passes, and 3.5 times the forward pass's FLOPs over them."""
    times = {}
    for record in measured("leaderboard"):
        case: dict[str, Any] = record.case
        options = (
            "(implementation=plain)" if case["attention"].get("implementation") == "plain" else ""
        )
        if not case["task"].get("compile"):
            name = case["attention"]["name"] + options
            times[name, str(case["task"]["head_dim"])] = slowest(record, "forward_backward")
    rows = rows_of("sweeps/leaderboard/", "TFLOP/s")
    assert len(rows) > 10
    for row in rows:
        ms = times[row["attention"], row["head_dim"]]
        assert row["both (ms)"] == number(ms)
        pairs = 16384 * 16385 / 2
        flops = 3.5 * 16 * pairs * 2 * 2 * int(row["head_dim"])
        assert float(row["TFLOP/s"]) == pytest.approx(flops / ms / 1e9, rel=0.01)


def test_strategy_scaling() -> None:
    steps = {}
    for record in measured("strategy_scaling"):
        ranks = len(record.phases["step"].samples_ms)
        ms = slowest(record, "step")
        tokens = record.case["batch_size"] * record.case["seq_len"] * ranks
        steps[record.case["parallel"]["name"], str(ranks)] = (ms, tokens / ms * 1e3)
    ((_, alone),) = [found for (_, ranks), found in steps.items() if ranks == "1"]
    rows = rows_of("strategy_scaling", "efficiency (%)")
    assert len(rows) == len(steps)
    for row in rows:
        ms, rate = steps[row["parallel"], row["ranks"]]
        assert row["step (ms)"] == number(ms)
        assert row["tokens/s"] == number(rate)
        share = 100 * rate / alone / int(row["ranks"])
        assert float(row["efficiency (%)"]) == pytest.approx(share, abs=0.06)


def test_short_sequences() -> None:
    times = {}
    for record in measured("short_sequences"):
        graph = "yes" if record.case["task"]["cuda_graph"] else "no"
        key = record.case["attention"]["name"], graph, record.case["seq_len"]
        times[key] = slowest(record, "forward_backward")
    rows = rows_of("short_sequences", "CUDA graph")
    assert len(rows) > 5
    for row in rows:
        for length in (512, 1024, 2048):
            ms = times[row["attention"], row["CUDA graph"], length]
            assert row[f"seq_len {length:,}"] == number(ms)


# Numbers and rankings outside of blocks

UNITS = (
    f"ms|µs|s|%|times|{TIMES}|x|GB/s|TFLOP/s|[GM]i?B|tokens/s|tokens a second|"
    "seconds?|minutes?|hours?|million|billion"
)
NUMBER = r"[\d.,]*\d"
STATED = re.compile(rf"(?<![\w.]){NUMBER}(?:(?: to | and | or |/){NUMBER})*[ -]?(?:{UNITS})(?!\w)")
RANKED = re.compile(
    r"\b(?:fastest|faster|slowest(?! rank)|slower|quickest|wins|as fast|level with)\b"
)


def percent(share: float) -> str:
    return f"{100 * share:g}%"


RULES = {
    f"lies beyond {percent(EQUIVALENCE)} from": "the band of verdicts",
    f"Ratios within {percent(EQUIVALENCE)}": "the same band between runs",
    (
        f"assumed ({percent(ASSUMED[True].std_log)} under 1 ms, "
        f"{percent(ASSUMED[False].std_log)} above)"
    ): "the levels of short and of other cases",
    f"takes over {percent(NOTICEABLE_WAIT)} longer": "when a time is host-bound",
    "slower by more than 5%": "what `--bound 5` asks for",
    "idles 2% longer": "a kernel made to",
    "can be no faster than reading the cache": "a bound, not a measurement",
    "is read faster than that": "why a share may pass 100%",
}
"""Words that may stand outside of blocks, with their number from the constant behind it."""


def stated(page: str) -> list[str]:
    """What a page says in numbers with a unit, or ranks, in its prose but not by a rule."""
    text = re.sub(r"```.*?```", "", without_blocks(read(page)), flags=re.DOTALL)
    text = re.sub(r"^\*(?:Laptop|\d GPU)[^*\n]*:\*$", "", text, flags=re.MULTILINE)
    # What a command answers is held to it by test_recommend_command.
    quoted = r"(^`attnbench recommend [^`]+` answers.*:\n\n)(?:> .*\n)+"
    text = re.sub(quoted, r"\1", text, flags=re.MULTILINE)
    text = re.sub(r"\]\([^)]*\)", "]", " ".join(re.sub(r"`[^`]*`", "`code`", text).split()))
    for words in RULES:
        text = text.replace(words, "")
    return [
        text[max(0, match.start() - 30) : match.end() + 30]
        for pattern in (STATED, RANKED)
        for match in pattern.finditer(text)
    ]


@pytest.mark.parametrize("page", [page for page in WITH_BLOCKS if page not in KEEP_A_LOG])
def test_prose_states_no_measured_number_and_ranks_nothing(page: str) -> None:
    assert stated(page) == []


def test_every_rule_is_stated() -> None:
    text = " ".join(" ".join(map(read, PAGES)).split())
    assert not [words for words in RULES if words not in text]


@pytest.mark.parametrize(
    "words",
    ["costs 1.22 times", "in 0.36 times the memory", "takes 815 µs", "89 and 79% of", "4,250 GB/s"],
)
def test_numbers_that_were_once_stated_are_found(words: str) -> None:
    assert STATED.search(f"It {words} that.")


def test_pages_of_old_are_found_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("`sdpa` takes 0.99 times its time.\n\nIt is fastest.\n", encoding="utf-8")
    monkeypatch.setattr("test_readme_numbers.read", lambda _: page.read_text(encoding="utf-8"))
    assert len(stated("README.md")) == 2
