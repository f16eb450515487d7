"""Words from other people where they meet a terminal, Markdown, HTML, CSV and LaTeX."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path

import pandas as pd
import pytest
from records import make_record, write_plan

from harness import escapes
from harness.commands import report, status, writeup
from harness.render.files import to_csv
from harness.render.latex import escape
from harness.render.table import Column, Table
from harness.store.record import RecordStore

HOSTILE = (
    "<script>alert(1)</script> [x](javascript:alert(1)) ![y](http://tracker/z.png) `a` | b "
    "\x1b[2J\x1b]0;title\x07 \x9b31m \u202eevil\u2066 </pre> $\\frac$ \\input{/etc/passwd} \x00"
)


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Hostile words wherever a record and a plan hold words that people read."""
    monkeypatch.setenv("PATH", "")
    folder = tmp_path / "results"
    store = RecordStore(folder)
    store.create()
    records = [
        make_record(attention="naive", samples_ms={"step": [[1.0, 1.1]]}),
        make_record(attention="sdpa", samples_ms={"step": [[2.0, 2.1]]}),
        make_record(attention="flex", status="failed", message=HOSTILE),
        make_record(attention="flex", seq_len=64, status="failed", message="=HYPERLINK(1)"),
    ]
    records[0].environment |= {"platform": HOSTILE, "git_revision": HOSTILE, "host": HOSTILE}
    records[1].case["model"]["name"] = f"$\\frac{HOSTILE}"
    for record in records:
        store.write(record)
    write_plan(folder, "all", records, tables=["cases", "summary"], figures=["step_time"])
    path = folder / "sweeps" / "all" / "plan.json"
    plan = json.loads(path.read_bytes()) | {"title": HOSTILE, "about": HOSTILE}
    path.write_text(json.dumps(plan), encoding="utf-8")
    (store.folder / "bad\x1b[31m\n`<b>-0123456789.json").write_text("{", encoding="utf-8")
    return folder


def unprintable(text: str) -> list[str]:
    return re.findall(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text)


def plain_markdown(text: str) -> str:
    """Markdown without its code, in which nothing is HTML or a link."""
    return re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)


def test_terminal(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main([str(results)]) == 0
    assert status.main([str(results), "--all"]) == 0
    said = capsys.readouterr()
    assert not unprintable(said.out + said.err)
    assert "\\x1b[2J" in said.out
    assert "Traceback" not in said.err


def test_markdown(results: Path) -> None:
    report.main([str(results)])
    writeup.main([str(results)])
    for name in ("sweeps/all/report.md", "sweeps/all/tables/cases.md", "writeup/writeup.md"):
        text = (results / name).read_text(encoding="utf-8")
        bare = plain_markdown(text)
        assert not unprintable(text), name
        assert not re.search(r"<(?!a id=|/a>)", bare), name
        assert not re.search(r"(?<!\\)\[[^\]]*\]\(\s*(javascript|http)", bare), name
    assert "javascript" in (results / "sweeps/all/report.md").read_text(encoding="utf-8")


def test_html(results: Path) -> None:
    writeup.main([str(results)])
    text = (results / "writeup" / "writeup.html").read_text(encoding="utf-8")
    assert "<script>alert" not in text
    assert "</pre> $" not in text
    assert 'href="javascript' not in text
    assert "&lt;script&gt;alert" in text


def test_latex(results: Path) -> None:
    report.main([str(results)])
    text = (results / "sweeps/all/tables/cases.tex").read_text(encoding="utf-8")
    assert text.isascii()
    assert not unprintable(text)
    assert "\\input{/etc" not in text
    assert escape("\x1b\\input{x}") == r"\textbackslash{}x1b\textbackslash{}input\{x\}"


@pytest.mark.parametrize(
    "cell", ["=1+1", "+1+cmd", "-2+3", "@SUM(A1)", "\t=1", "\r=1", "=HYPERLINK(1)"]
)
def test_csv(cell: str) -> None:
    rows = pd.DataFrame({"case_id": [cell, "a"], "reason": [cell, None], "ms": [-1.5, 2.0]})
    table = Table(
        name="x",
        caption="x",
        columns=[Column(key="reason", header="reason"), Column(key="ms", header="ms")],
        rows=rows,
    )
    first, second = csv.DictReader(io.StringIO(to_csv(table)))
    assert first["reason"] == first["case_id"] == "'" + cell.replace("\r", " ")
    assert (first["ms"], second["ms"], second["reason"]) == ("-1.5", "2.0", "")


@pytest.mark.parametrize("cell", ["-1.5", "+3", "-1e-7", "-inf", "-", "1,234", "a=b", ""])
def test_csv_leaves_numbers_and_other_words(cell: str) -> None:
    assert escapes.spreadsheet(cell) == cell


def test_ordinary_words_stay_as_they_are() -> None:
    for text in ("ddp_bucketed(bucket_size_mb=4)", "12.3 ± 0.4", "µs ⋆ é", "a [b] c", "x > y"):
        assert escapes.printable(text) == text
        assert escapes.markdown(text) == text
