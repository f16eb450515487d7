"""What the paper asks, what the appendix folds away, and both for the committed H200 records."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
from programs import need_program
from records import in_rounds, make_record, write_plan
from writeup_examples import scaling

from harness.analysis.loading import load_frames
from harness.cases import format as fmt
from harness.cases.sweep import THEMES, PaperQuestion, load_sweep
from harness.commands.writeup import write_document
from harness.paths import ROOT, project_sweeps
from harness.render.figure import build_figure
from harness.render.selection import Selection, rows_where, selected
from harness.render.table import Column, Table
from harness.store.record import RecordStore
from harness.store.sweep_plan import planned_labels
from harness.writeup.collecting import collect
from harness.writeup.document import Document
from harness.writeup.folding import fold, shown_cases
from harness.writeup.html import to_html
from harness.writeup.latex_paper import to_latex_paper
from harness.writeup.questions import MAX_ROWS
from harness.writeup.words import in_brief, short

H200 = ROOT / "results" / "h200"


def asked() -> Iterator[tuple[str, PaperQuestion]]:
    """Every question of the project's sweeps, with the sweep's name."""
    for name in project_sweeps():
        for choice in load_sweep(name).paper:
            yield name, choice


@pytest.mark.parametrize("name", project_sweeps())
def test_a_sweep_that_asks_has_a_theme(name: str) -> None:
    sweep = load_sweep(name)
    assert sweep.theme in THEMES or not sweep.paper


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("theme: kernel", "theme: kernel: one of kernels, "),
        ("paper: Which?", "paper must be a list of questions"),
        ("paper: [{table: summary}]", "every entry is a mapping with a question"),
        ("paper: [{question: Q, colour: red}]", "paper.colour: one of question, place, "),
        ("paper: [{question: Q, place: first}]", "paper.place: first: must be int"),
        ("paper: [{question: Q, table: cases}]", "paper.table: cases: one of summary"),
        ("paper: [{question: Q, theme: k}]", "paper.theme: k: one of kernels, "),
    ],
)
def test_mistakes_of_a_sweep_file_are_one_line(entry: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(f"tables: [summary]\n{entry}\nscales: {{full: [{{}}]}}\n", encoding="utf-8")
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        load_sweep(str(path))
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def folder_of(path: Path, name: str, tables: list[str], figures: list[str]) -> Path:
    store = RecordStore(path)
    store.create()
    records = [in_rounds(record) for record in scaling()]
    for record in records:
        store.write(record)
    write_plan(path, name, records, tables=tables, figures=figures)
    return path


class TestQuestions:
    def test_a_sweep_asks_what_its_file_says(self, tmp_path: Path) -> None:
        tables, figures = ["summary", "attention_summary"], ["step_time", "attention_scaling"]
        folder = folder_of(tmp_path, "quickstart", tables, figures)
        document = collect([folder])
        (question,) = document.questions  # No training step was measured.
        assert question.question == load_sweep("quickstart").paper[0].question
        assert question.theme == "Kernels"
        assert question.verdict.startswith("flex is fastest")
        table = question.table
        assert table is not None
        assert [column.full_header for column in table.table.columns] == [
            *("seq_len", "attention naive", "attention flex", "attention sdpa_flash"),
        ]
        assert table.table.cells()[-1][:2] == ["4,096", "OOM"]
        assert [theme.title for theme in document.themes] == ["Kernels"]

    def test_a_choice_that_does_not_fit_shows_the_table_as_it_is(self, tmp_path: Path) -> None:
        """One's own records may have other rows and columns than a sweep's file names."""
        folder = folder_of(tmp_path, "context_parallel", ["attention_summary"], [])
        (question,) = collect([folder]).questions
        (choice,) = load_sweep("context_parallel").paper
        assert question.question == choice.question
        assert question.table is not None
        headers = {column.full_header for column in question.table.table.columns}
        assert {"seq_len", "attention", "forward (ms)"} <= headers

    def test_long_tables_end_in_the_appendix(self, tmp_path: Path) -> None:
        folder = folder_of(tmp_path, "lengths", ["cases"], [])
        (question,) = collect([folder]).questions
        assert question.table is not None
        assert len(question.table.table.rows) == MAX_ROWS
        whole = collect([folder]).sections[0].tables[0]
        assert question.rows_left == len(whole.table.rows) - MAX_ROWS > 0
        assert f"{question.rows_left} more rows in the appendix" in to_latex_paper(
            collect([folder])
        )


class TestFolding:
    def test_rows_without_a_result_become_a_sentence(self) -> None:
        rows = pd.DataFrame(
            {
                "case_id": ["a", "b", "c", "d"],
                "attention": ["naive", "flash_attn_2", "flash_attn_2", "flex"],
                "seq_len": [512, 512, 1024, 512],
                "ms": [1.0, None, None, 2.0],
                "status": ["ok", "unsupported", "unsupported", "ok"],
                "reason": [None, "not installed", "not installed", None],
                "heads": [4, 4, 4, 4],
            }
        )
        columns = [
            Column(key="attention", header="attention", point=True),
            Column(key="seq_len", header="seq_len", format=fmt.integer, point=True),
            Column(key="ms", header="ms", format=fmt.number, status="status"),
            Column(key="heads", header="heads", format=fmt.integer, point=True),
        ]
        folded = fold(Table(caption="Times.", columns=columns, rows=rows))
        assert folded.sentences == ["flash_attn_2: unsupported in 2 rows (not installed)."]
        assert folded.num_rows == 2
        assert [column.header for column in folded.table.columns] == ["attention", "ms"]
        assert folded.table.caption == "Times. In every row: seq_len 512, heads 4."
        assert folded.table.cells() == [["naive", "1.00"], ["flex", "2.00"]]
        assert shown_cases(folded.table) == {"a", "d"}

    def test_facts_of_an_unsupported_case_do_not_keep_its_row(self) -> None:
        """The number of samples and the baseline's time are filled for any case."""
        rows = pd.DataFrame(
            {
                "attention": ["naive", "flex", "flash_attn_2"],
                "ms": [1.0, 2.0, None],
                "status": ["ok", "ok", "unsupported"],
                "baseline_ms": [3.0, 3.5, 3.0],
                "rounds": [3, 2, 0],
                "other_ms": [None, None, None],
                "other_status": ["unsupported"] * 3,
            }
        )
        columns = [
            Column(key="attention", header="attention", point=True),
            Column(key="ms", header="ms", format=fmt.number, status="status"),
            Column(key="baseline_ms", header="baseline (ms)", format=fmt.number),
            Column(key="rounds", header="rounds", format=fmt.integer),
            Column(key="other_ms", header="other (ms)", status="other_status"),
        ]
        folded = fold(Table(caption="Times.", columns=columns, rows=rows))
        assert folded.table.cells() == [
            ["naive", "1.00", "3.00", "3"],
            ["flex", "2.00", "3.50", "2"],
        ]
        assert folded.sentences == [
            "flash_attn_2: unsupported in 1 row.",
            "other (ms): unsupported in every row.",
        ]

    def test_a_row_that_ran_out_of_memory_stays(self, document: Document) -> None:
        tables = [item.table for section in document.sections for item in section.tables]
        assert any("OOM" in row for table in tables for row in table.cells())


class TestSelection:
    def test_a_condition_on_what_there_is_not_is_one_line(self) -> None:
        rows = pd.DataFrame({"seq_len": [512, 1024]})
        assert list(rows_where(rows, "seq_len > 512").seq_len) == [1024]
        with pytest.raises(ValueError, match="where: kernel == 'a'"):
            rows_where(rows, "kernel == 'a'")

    def test_an_unknown_header_names_those_that_there_are(self) -> None:
        table = Table(
            caption="",
            columns=[Column(key="a", header="here")],
            rows=pd.DataFrame({"a": ["x"]}),
        )
        with pytest.raises(ValueError, match="gone: one of the headers here"):
            selected(table, Selection(columns="gone"))


def test_words_are_shortened_at_sentences() -> None:
    assert in_brief("One 2.5. Two. Three.") == "One 2.5. Two."
    assert short("Times. What else. All rows: bf16.") == "Times. All rows: bf16."


def test_a_row_of_an_unsupported_case_is_in_no_table_and_counted(tmp_path: Path) -> None:
    store = RecordStore(tmp_path)
    store.create()
    good = [in_rounds(record) for record in scaling()]
    bad = [
        make_record(
            task="attention",
            mode="forward_backward",
            attention="sdpa_cudnn",
            seq_len=length,
            status="unsupported",
            message="needs a GPU",
        )
        for length in (512, 1024)
    ]
    for record in (*good, *bad):
        store.write(record)
    write_plan(tmp_path, "some", [*good, *bad], tables=["cases"], figures=[])
    document = collect([tmp_path])
    (item,) = document.sections[0].tables
    assert item.folded == ["sdpa_cudnn: unsupported in 2 rows (needs a GPU)."]
    assert item.num_folded == 2
    assert item.folded[0] in to_html(document, tmp_path)


def test_the_committed_paper_asks_what_the_sweeps_ask() -> None:
    text = (H200 / "writeup" / "paper.md").read_text(encoding="utf-8")
    asked = [
        choice.question
        for name in project_sweeps()
        if (H200 / "sweeps" / name / "plan.json").is_file()
        for choice in load_sweep(name).paper
    ]
    assert len(asked) >= 12
    assert [question for question in asked if f"### {question}" not in text] == []


@pytest.mark.exhaustive
class TestH200:
    """The committed records: the size of what is written, and that nothing is lost."""

    @pytest.fixture(scope="class")
    def whole(self) -> Document:
        return collect([H200])

    @pytest.fixture(scope="class")
    def folder(self, whole: Document, tmp_path_factory: pytest.TempPathFactory) -> Path:
        folder = tmp_path_factory.mktemp("h200")
        write_document(whole, folder)
        return folder

    def test_the_paper_has_8_to_12_pages(self, folder: Path) -> None:
        need_program("pdflatex", "texlive-latex-recommended")
        command = [need_program("pdfinfo", "poppler-utils"), str(folder / "paper.pdf")]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        pages = re.search(r"Pages: +(\d+)", done.stdout)
        assert pages is not None
        assert 8 <= int(pages[1]) <= 12

    def test_the_page_is_small(self, folder: Path) -> None:
        assert (folder / "writeup.html").stat().st_size < 4_000_000

    def test_the_committed_paper_is_of_the_committed_records(self, folder: Path) -> None:
        """Its verdicts and the rows of its tables; links depend on where it lies."""

        def results(path: Path) -> list[str]:
            lines = path.read_text(encoding="utf-8").splitlines()
            return [line for line in lines if line.startswith(("|", "**Verdict.**"))]

        found = results(folder / "paper.md")
        assert len(found) > 200
        assert results(H200 / "writeup" / "paper.md") == found

    def test_every_record_is_in_the_appendix(self, whole: Document) -> None:
        """In a row, in a sentence on rows that hold nothing, or by its name."""
        shown: set[str] = set()
        for section in whole.sections:
            shown |= set(section.unshown)
            shown |= {case_id for item in section.tables for case_id in shown_cases(item.table)}
        lost = [
            record
            for (_, case_id), record in whole.records.items()
            if case_id not in shown and record.status != "unsupported"
        ]
        assert lost == []

    def test_figures_of_the_paper_show_the_rows_that_their_sweeps_choose(self) -> None:
        frame_of = load_frames(H200)
        checked = 0
        for plan, choice in asked():
            if choice.figure_where and plan in planned_labels(H200):
                frame = frame_of(plan)
                rows = rows_where(frame, choice.figure_where)
                assert 0 < len(rows) <= len(frame), plan
                assert build_figure(choice.figure, rows) is not None, plan
                checked += 1
        assert checked >= 5

    def test_a_verdict_of_a_figure_is_on_all_rows_of_its_table(self, whole: Document) -> None:
        (question,) = (item for item in whole.questions if item.anchor == "paper-mixed-precision-1")
        assert question.table is not None
        assert question.figure is not None
        assert "model small" in str(
            [axis.get_title() for axis in question.figure.drawn.figure.axes]
        )
        assert f"{len(question.table.table.rows)} points" in question.verdict
        assert f"{len(question.table.table.rows)} points" not in question.figure.drawn.finding

    def test_choices_of_the_sweeps_fit_their_records(self, whole: Document) -> None:
        for question in whole.questions:
            assert question.verdict, question.question
            assert question.table is not None, question.question
            assert question.rows_left == 0, question.question
            assert len(question.table.table.columns) <= 12 or not question.table.table.rows.empty
