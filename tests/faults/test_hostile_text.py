"""Words from other people where they meet a terminal, Markdown, HTML, CSV and LaTeX."""

from __future__ import annotations

import argparse
import ast
import csv
import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from conftest import ROOT
from records import make_record, write_plan
from rich.live import Live
from rich.markup import escape as escape_markup
from rich.table import Table as RichTable
from rich.text import Text

from harness import escapes
from harness.commands import cancel, compare, pack, report, status, writeup
from harness.printing import PrintableStream
from harness.render.files import to_csv
from harness.render.latex import escape
from harness.render.table import Column, Table
from harness.store.record import RecordStore
from harness.terminal import PrintableConsole

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


def install(monkeypatch: pytest.MonkeyPatch) -> io.BytesIO:
    """Standard output and error as the console scripts have them, into one buffer."""
    written = io.BytesIO()
    for name in ("stdout", "stderr"):
        stream = PrintableStream(written, encoding="utf-8", write_through=True)
        monkeypatch.setattr(sys, name, stream)
    return written


ESCAPES = "\x1b[2J\x1b]0;title\x07\x9b31m\u202e"
ODD = f"odd{ESCAPES}\nattnbench: all is well"
"""A name that is allowed on this file system, and reads like a line of its own."""


def odd_folder(folder: Path) -> Path:
    """A results folder with a strange name, whose files and sweeps have such names too."""
    store = RecordStore(folder / ODD)
    store.create()
    records = [make_record(attention=name, samples_ms={"step": [[1.0]]}) for name in ("a", "b")]
    for record in records:
        record.case["attention"]["name"] = f"x{ESCAPES}"
        store.write(record)
    (store.folder / f"{ODD}-0123456789.json").write_text("{")
    write_plan(store.results, "all", records, tables=["summary"])
    other = store.results / "sweeps" / ODD
    other.mkdir()
    (other / "plan.json").write_text("{")
    run = store.results / "runs" / ODD
    run.mkdir(parents=True)
    (run / "run.json").write_text("{")
    store.archives.folder.mkdir()
    (store.archives.folder / f"{ODD}.jsonl.xz").write_text("no archive")
    return store.results


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "status": status.main,
    "cancel": cancel.main,
    "report": report.main,
    "compare": compare.main,
    "pack": pack.main,
    "writeup": writeup.main,
}


@pytest.mark.parametrize("place", ["there", "missing", "other sweep"])
@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_prints_escapes(
    name: str,
    place: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "")
    folder = odd_folder(tmp_path)
    arguments = [str(folder)] * (2 if name == "compare" else 1)
    if place == "missing":
        arguments = [f"{argument}/gone{ESCAPES}\nattnbench: fine" for argument in arguments]
    elif place == "other sweep" and name in ("report", "pack"):
        arguments += [f"gone{ESCAPES}\nattnbench: fine"]
    COMMANDS[name](arguments)
    said = capsys.readouterr()
    assert said.out or said.err
    assert not unprintable(said.out + said.err)
    assert "\nattnbench: all is well" not in said.out + said.err
    assert "\nattnbench: fine" not in said.out + said.err


def test_what_libraries_print_meets_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = install(monkeypatch)
    print(f"a {HOSTILE}\nb")
    argparse.ArgumentParser(prog="x").print_usage()
    text = installed.getvalue().decode()
    assert text.startswith("a <script>")
    assert "\nb\n" in text
    assert not unprintable(text)


def test_a_console_keeps_its_own_codes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = install(monkeypatch)
    console = PrintableConsole(force_terminal=True, width=200, color_system="standard")
    table = RichTable("name")
    table.add_row(Text(f"cell {HOSTILE}"))
    with Live(table, console=console, transient=True, auto_refresh=False) as live:
        live.refresh()
        console.print(f"line {escape_markup(HOSTILE)}", style="red")
        print(f"redirected \x9b31m \u202e {ESCAPES}")
    text = installed.getvalue().decode()
    assert "\x1b[31mline" in text
    assert "\x1b[2K" in text, "the cursor of the live line"
    assert "\x1b[2J" not in text
    assert "\x1b]0" not in text
    assert not unprintable(text.replace("\x1b", "").replace("\r", ""))


def test_everything_draws_with_that_console() -> None:
    """None of rich's own, which writes what it is given."""
    made = [
        f"{path.name}:{node.lineno}"
        for path in (ROOT / "harness").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "Console"
    ]
    assert made == []


def test_what_is_said_on_standard_error_is_made_printable() -> None:
    """By ``harness.printing.warn``; an empty line alone may be printed directly."""
    printed = [
        f"{path.name}:{node.lineno}"
        for path in (ROOT / "harness").rglob("*.py")
        if path.name != "printing.py"
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
        and node.args
        and any(keyword.arg == "file" for keyword in node.keywords)
    ]
    assert printed == []


PAGES = ("writeup/paper.md", "writeup/appendix.md")


def test_markdown(results: Path) -> None:
    report.main([str(results)])
    writeup.main([str(results)])
    for name in ("sweeps/all/report.md", "sweeps/all/tables/cases.md", *PAGES):
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
    assert first["reason"] == first["case_id"] == "'" + re.sub("[\r\t]", " ", cell)
    assert (first["ms"], second["ms"], second["reason"]) == ("-1.5", "2.0", "")


@pytest.mark.parametrize("cell", ["a\x1b[31mb", "a\u2028b", "=1\x9b31m", "a\nb"])
def test_csv_on_a_terminal(cell: str) -> None:
    found = escapes.spreadsheet(cell)
    assert isinstance(found, str)
    assert not unprintable(found)
    assert "\n" not in found


@pytest.mark.parametrize("cell", ["-1.5", "+3", "-1e-7", "-inf", "-", "1,234", "a=b", ""])
def test_csv_leaves_numbers_and_other_words(cell: str) -> None:
    assert escapes.spreadsheet(cell) == cell


def test_ordinary_words_stay_as_they_are() -> None:
    for text in ("ddp_bucketed(bucket_size_mb=4)", "12.3 ± 0.4", "µs ⋆ é", "a [b] c", "x > y"):
        assert escapes.printable(text) == text
        assert escapes.markdown(text) == text
