"""The paper and the appendix of a small results folder: document, Markdown and LaTeX."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pandas as pd
import pytest
from programs import need_program
from records import make_record, write_plan
from writeup_examples import gray, scaling

from harness.commands.report import main as report
from harness.commands.writeup import main, write_document
from harness.render.latex import LONG_TABLE_ROWS, escape, to_latex
from harness.render.table import Column, Table
from harness.store.record import RecordStore
from harness.writeup.collecting import collect
from harness.writeup.document import Document
from harness.writeup.latex import PREAMBLE, to_latex_appendix
from harness.writeup.pdf import LatexError, compile_pdf


class TestDocument:
    def test_numbers_run_through_all_sweeps(self, document: Document) -> None:
        tables = [item.number for section in document.sections for item in section.tables]
        figures = [item.number for section in document.sections for item in section.figures]
        assert tables == ["A1", "A2", "A3", "A4"]
        assert figures == ["A1", "A2", "A3"]
        assert [question.table.number for question in document.questions if question.table] == [
            *("1", "2"),
        ]

    def test_each_sweep_asks_one_question(self, document: Document) -> None:
        """Neither has a file of its own that asks another one."""
        asked = [question.question for question in document.questions]
        assert asked == [section.title for section in document.sections]
        assert [question.section.anchor for question in document.short_answer()] == [
            document.sections[0].anchor
        ]

    def test_markdown(self, written: Path, document: Document) -> None:
        paper = (written / "paper.md").read_text(encoding="utf-8")
        for words in (
            "## Short answer",
            "- **Other measurements.** flex is fastest at ",
            "**Verdict.** flex is fastest at ",
            "**Table 2.** Median time of the phases",
            "**Figure 2.** Median time",
            "![attention_scaling](figures/paper-fig-lengths-1.png)",
            "- **Without a number.** 1 of 14 cases have no result: 1 OOM.",
        ):
            assert words in paper, words
        text = (written / "appendix.md").read_text(encoding="utf-8")
        for words in (
            "> flex is fastest in bf16 from 1,024 tokens on;",
            "**Table A4.** Median time of the phases",
            "**Figure A3.** Median time",
            "![attention_scaling](figures/fig-lengths-attention-scaling.png)",
            "Without a number: 1 OOM (CUDA out of memory).",
            "| device | NVIDIA H200 |",
            "- **Warm-up.** Every case",
            "- lengths: 1 case not measured (attention-planned-0123456789): "
            f"`attnbench sweeps=lengths results={written.parent}`",
            f"- leaderboard: not run: `attnbench sweeps=leaderboard results={written.parent} "
            "device=cuda`",
        ):
            assert words in text, words
        for page in (paper, text):
            assert not re.search(r"\n\n\n\n", page)
            for link in re.findall(r"\]\(([^)#]+)\)", page):
                assert (written / link).exists(), link
            for anchor in re.findall(r"\]\(#([^)]+)\)", page):
                assert f'<a id="{anchor}"></a>' in page

    def test_figures_are_those_of_the_sweeps_reports(self, results: Path, tmp_path: Path) -> None:
        """A copy stands for one that is missing or out of date, and outside the folder for all."""
        folder = tmp_path / "results"
        shutil.copytree(results, folder, ignore=shutil.ignore_patterns("writeup", "steps"))
        tables, figures = ["attention_summary"], ["attention_scaling"]
        write_plan(folder, "lengths", scaling(), tables=tables, figures=figures)
        own = "](../sweeps/lengths/figures/attention_scaling.png)"
        copy = "](figures/fig-lengths-attention-scaling.png)"

        def text_in(place: Path) -> str:
            write_document(collect([folder]), place)
            text = (place / "appendix.md").read_text(encoding="utf-8")
            links = re.findall(r"^!\[.*\]\((.+)\)", text, re.MULTILINE)
            (link,) = links
            assert (place / link).exists()
            return text

        inside = folder / "writeup"
        assert copy in text_in(inside)
        assert report([str(folder)]) == 0
        assert own in text_in(inside)
        assert not list(inside.glob("figures/*.png"))
        assert copy in text_in(tmp_path / "elsewhere")
        drawn = folder / "sweeps/lengths/figures/attention_scaling.png"
        drawn.write_bytes(drawn.read_bytes()[:-1] + b" ")
        assert copy in text_in(inside)

    def test_several_folders(self, results: Path, tmp_path: Path) -> None:
        other = tmp_path / "other"
        shutil.copytree(results, other, ignore=shutil.ignore_patterns("writeup"))
        both = collect([results, other])
        assert len({section.anchor for section in both.sections}) == 4
        assert both.sections[0].title.endswith("(results_50%)")

    def test_what_is_not_a_results_folder_is_one_line(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main([str(tmp_path)]) == 2
        assert main([str(tmp_path / "gone")]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert "not a results folder" in lines[0]
        assert "no such folder" in lines[1]
        assert len(lines) == 2

    def test_a_record_that_cannot_be_read_is_named(self, results: Path, tmp_path: Path) -> None:
        folder = tmp_path / "results"
        shutil.copytree(results, folder, ignore=shutil.ignore_patterns("writeup"))
        (folder / "records" / "broken-0123456789.json").write_text("{", encoding="utf-8")
        (problem,) = collect([folder]).problems
        assert "broken-0123456789.json" in problem


class TestLatex:
    @pytest.mark.parametrize(
        ("name", "said"),
        [
            ("paper", ["Short answer", "Verdict.", "Table 2:", "Figure 2:", "Limits"]),
            ("appendix", ["Contents", "Table A4:", "Figure A3:", "What is missing"]),
        ],
    )
    def test_pages(self, name: str, said: list[str], written: Path, tmp_path: Path) -> None:
        """Every page has ink, none of it beyond the margins; references have numbers."""
        need_program("pdflatex", "texlive-latex-recommended")
        renderer = need_program("pdftoppm", "poppler-utils")
        pdf = written / f"{name}.pdf"
        command = [renderer, "-r", "40", "-gray", str(pdf), str(tmp_path / "page")]
        subprocess.run(command, check=True)
        pages = sorted(tmp_path.glob("page*.pgm"))
        assert len(pages) >= 2
        for page in pages:
            width, _, pixels = gray(page)
            ink = [index for index, value in enumerate(pixels) if value < 128]
            assert len(ink) > 100, f"{page.name} is blank"
            assert min(index % width for index in ink) > 0.05 * width, page.name
            assert max(index % width for index in ink) < 0.95 * width, page.name
        text = subprocess.run(
            [need_program("pdftotext", "poppler-utils"), "-layout", str(pdf), "-"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        assert "??" not in text
        for words in (*said, "results_50%"):
            assert words in text, words

    def test_wide_and_long_tables_are_cut(self, tmp_path: Path) -> None:
        need_program("pdflatex", "texlive-latex-recommended")
        names = ["naive", "flex", "sdpa_flash", "sdpa_efficient", "sdpa_cudnn", "sdpa_math"]
        names += ["flash_triton", "flash_torch", "compiled", "flash_attn_4"]
        passes = ("forward", "backward", "forward_backward")
        records = [
            make_record(
                task="attention",
                mode="forward_backward",
                attention=name,
                seq_len=128 * length,
                samples_ms={phase: [[1234.5678 * length]] for phase in passes},
            )
            for length in range(1, 201)
            for name in names
        ]
        store = RecordStore(tmp_path)
        store.create()
        for record in records:
            # The test is of tables, not of how records reach the disk.
            (store.folder / f"{record.case_id}.json").write_text(record.to_json())
        write_plan(tmp_path, "wide", records, tables=["flash_benchmarking"])
        text = to_latex_appendix(collect([tmp_path]))
        # 56 of the 200 rows, and ten backends in two blocks.
        assert text.count(r"\begin{table}") == 2
        assert "144 more rows are in" in text
        # Rows of the second block are known by their numbers.
        assert text.count("row & ") == 2
        path = tmp_path / "appendix.tex"
        path.write_text(text, encoding="utf-8")
        assert compile_pdf(path) == tmp_path / "appendix.pdf"

    def test_glyphs(self, tmp_path: Path) -> None:
        """What text holds is what the page shows: no code of a character, and no dash."""
        need_program("pdflatex", "texlive-latex-recommended")
        reader = need_program("pdftotext", "poppler-utils")
        texts = [
            "S\u00b2 \u00d7 10\u207b\u00b3",
            "pip --no-build-isolation",
            "1 \u2013 2 \u2264 \u03b1",
        ]
        lines = [rf"\texttt{{{escape(text)}}}\par {escape(text)}\par" for text in texts]
        path = tmp_path / "glyphs.tex"
        body = "\n".join([PREAMBLE, r"\begin{document}", *lines, r"\end{document}"])
        path.write_text(body, encoding="ascii")
        pdf = compile_pdf(path)
        done = subprocess.run(
            [reader, "-layout", str(pdf), "-"], check=True, capture_output=True, text=True
        )
        assert "U+" not in done.stdout
        assert done.stdout.count("--no-build-isolation") == 2
        assert done.stdout.replace(" ", "").count("1\u20132\u2264\u03b1") == 2

    @pytest.mark.parametrize("num_rows", [10, LONG_TABLE_ROWS + 30])
    @pytest.mark.parametrize(
        ("options", "before"),
        [("", ""), ("[twocolumn]", ""), ("[twocolumn]", r"\def\attnbenchfloat{table*}")],
    )
    def test_a_paper_can_input_a_table(
        self, options: str, before: str, num_rows: int, tmp_path: Path
    ) -> None:
        """In one column or two, no wider than where it stands."""
        need_program("pdflatex", "texlive-latex-recommended")
        columns = [Column(key=f"c{place}", header=f"column {place}") for place in range(9)]
        rows = pd.DataFrame({column.key: ["value"] * num_rows for column in columns})
        table = Table(name="own", caption="Caption.", columns=columns, rows=rows)
        (tmp_path / "own.tex").write_text(to_latex(table), encoding="ascii")
        loaded = r"\usepackage[T1]{fontenc}\usepackage{booktabs,graphicx,longtable}"
        body = rf"\begin{{document}}Before.{before}\input{{own}}After.\end{{document}}"
        path = tmp_path / "paper.tex"
        path.write_text(rf"\documentclass{options}{{article}}{loaded}{body}", encoding="ascii")
        done = subprocess.run(
            ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", path.name],
            cwd=tmp_path,
            capture_output=True,
        )
        log = done.stdout.decode(errors="replace")
        assert done.returncode == 0, log[-500:]
        assert r"Overfull \hbox" not in log

    def test_a_reference_to_nothing_is_an_error(self, tmp_path: Path) -> None:
        need_program("pdflatex", "texlive-latex-recommended")
        path = tmp_path / "bad.tex"
        body = r"\documentclass{article}\begin{document}See \ref{gone}.\end{document}"
        path.write_text(body, encoding="utf-8")
        with pytest.raises(LatexError, match=r"gone.*undefined"):
            compile_pdf(path)
