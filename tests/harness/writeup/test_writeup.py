"""The write-up of a small results folder: the document, LaTeX and the page."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Browser, find_browser
from programs import need, need_program
from records import in_rounds, make_record, write_plan
from writeup_examples import scaling, steps

from harness.commands.report import main as report
from harness.commands.writeup import main, write_document
from harness.store.record import RecordStore
from harness.writeup.document import Document, collect
from harness.writeup.html import to_html
from harness.writeup.latex import LatexError, compile_pdf, to_latex_document


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sweeps, one of them with a case that was never measured."""
    folder = tmp_path_factory.mktemp("written") / "results_50%"
    store = RecordStore(folder)
    store.create()
    for record in map(in_rounds, [*scaling(), *steps()]):
        store.write(record)
    write_plan(
        folder,
        "lengths",
        scaling(),
        tables=["attention_summary", "flash_benchmarking", "cases"],
        figures=["attention_scaling", "tflops_over_length"],
        missing=["attention-planned-0123456789"],
    )
    write_plan(folder, "steps", steps(), tables=["summary"], figures=["step_time"])
    return folder


@pytest.fixture(scope="module")
def document(results: Path) -> Document:
    return collect([results])


@pytest.fixture(scope="module")
def written(results: Path, document: Document) -> Path:
    """The folder with the document in every format that can be made here."""
    folder = results / "writeup"
    write_document(document, folder)
    return folder


class TestDocument:
    def test_numbers_run_through_all_sweeps(self, document: Document) -> None:
        tables = [item.number for section in document.sections for item in section.tables]
        figures = [item.number for section in document.sections for item in section.figures]
        assert tables == [1, 2, 3, 4]
        assert figures == [1, 2, 3]

    def test_each_sweep_has_one_main_finding(self, document: Document) -> None:
        found = [(kind, number) for kind, number, *_ in document.main_findings()]
        measured = [section for section in document.sections if section.tables]
        assert found == [("Table", section.tables[0].number) for section in measured]

    def test_markdown(self, written: Path, document: Document) -> None:
        text = (written / "writeup.md").read_text(encoding="utf-8")
        for words in (
            "## Main findings",
            "- [Table 1](#tab-lengths-attention-summary): flex is fastest at ",
            "> flex is fastest in bf16 from 1,024 tokens on;",
            "**Table 4.** Median time of the phases",
            "**Figure 3.** Median time",
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
        assert not re.search(r"\n\n\n\n", text)
        for link in re.findall(r"\]\(([^)#]+)\)", text):
            assert (written / link).exists(), link
        for anchor in re.findall(r"\]\(#([^)]+)\)", text):
            assert f'<a id="{anchor}"></a>' in text

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
            text = (place / "writeup.md").read_text(encoding="utf-8")
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
    def test_pages(self, written: Path, tmp_path: Path) -> None:
        """Every page has ink, none of it beyond the margins; references have numbers."""
        need_program("pdflatex", "texlive-latex-recommended")
        renderer = need_program("pdftoppm", "poppler-utils")
        pdf = written / "writeup.pdf"
        command = [renderer, "-r", "40", "-gray", str(pdf), str(tmp_path / "page")]
        subprocess.run(command, check=True)
        pages = sorted(tmp_path.glob("page*.pgm"))
        assert len(pages) >= 4
        for page in pages:
            width, _, pixels = _gray(page)
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
        for words in ("Main findings", "Table 4:", "Figure 3:", "What is missing", "results_50%"):
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
                samples_ms={phase: [[1234.5678]] for phase in passes},
            )
            for length in range(1, 151)
            for name in names
        ]
        store = RecordStore(tmp_path)
        store.create()
        for record in records:
            # The test is of tables, not of how records reach the disk.
            (store.folder / f"{record.case_id}.json").write_text(record.to_json())
        write_plan(tmp_path, "wide", records, tables=["flash_benchmarking"])
        text = to_latex_document(collect([tmp_path]))
        # 132 of the 150 rows in three blocks, and ten backends in two.
        assert text.count(r"\begin{table}") == 3 * 2
        assert "18 more rows are in" in text
        path = tmp_path / "writeup.tex"
        path.write_text(text, encoding="utf-8")
        assert compile_pdf(path) == tmp_path / "writeup.pdf"

    def test_a_reference_to_nothing_is_an_error(self, tmp_path: Path) -> None:
        need_program("pdflatex", "texlive-latex-recommended")
        path = tmp_path / "bad.tex"
        body = r"\documentclass{article}\begin{document}See \ref{gone}.\end{document}"
        path.write_text(body, encoding="utf-8")
        with pytest.raises(LatexError, match=r"gone.*undefined"):
            compile_pdf(path)


def _gray(path: Path) -> tuple[int, int, bytes]:
    """Width, height and pixels of a binary PGM."""
    kind, width, height, _, pixels = path.read_bytes().split(maxsplit=4)
    assert kind == b"P5"
    return int(width), int(height), pixels[-int(width) * int(height) :]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = need(find_browser(), "chromium", "chromium")
    opened = Browser(program, tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


@pytest.fixture
def page(browser: Browser, written: Path) -> Iterator[Browser]:
    """The page, freshly loaded; scripts that throw and requests that leave it fail the test."""
    browser.resize(1280, 900)
    browser.prefer("light")
    browser.requests.clear()
    browser.errors.clear()
    browser.open(written / "writeup.html")
    yield browser
    assert not browser.errors
    own = [url for url in browser.requests if not url.startswith("data:")]
    assert own == [(written / "writeup.html").as_uri()]


TABLE = "#tab-lengths-attention-summary"


def column(page: Browser, index: int) -> list[str]:
    """The texts of one column in the rows that are shown, from the top."""
    found = page.run(
        f"[...document.querySelectorAll('{TABLE} tbody tr')].filter(row => !row.hidden)"
        f".map(row => row.cells[{index}].textContent)"
    )
    return list(found)


def test_a_page_of_thousands_of_rows_is_cut(
    document: Document, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.writeup.html.MAX_ROWS", 5)
    text = to_html(document, Path())
    assert "7 more rows are in the CSV." in text


class TestPage:
    def test_sort(self, page: Browser) -> None:
        heads = page.run(
            f"[...document.querySelectorAll('{TABLE} thead tr:last-child th')]"
            ".map(head => head.textContent)"
        )
        place = heads.index("forward (ms)")
        before = column(page, place)
        page.click(f"{TABLE} thead tr:last-child th button", place)
        ascending = column(page, place)
        assert ascending[0] == "1.00†"
        assert ascending[-1] == "OOM"
        numbers = [float(text.rstrip("†")) for text in ascending[:-1]]
        assert numbers == sorted(numbers)
        page.click(f"{TABLE} thead tr:last-child th button", place)
        descending = column(page, place)
        assert descending[:-1] == ascending[:-1][::-1]
        assert descending[-1] == "OOM"
        page.click(f"{TABLE} thead tr:last-child th button", place)
        assert column(page, place) == before

    def test_filter(self, page: Browser) -> None:
        page.type(f"{TABLE} input", "naive 1,024")
        assert column(page, 0) == ["1,024"]
        count = f"document.querySelector('{TABLE} .count').textContent"
        assert page.run(count) == "1 of 12 rows"
        page.run(
            f"(() => {{ const field = document.querySelector('{TABLE} input'); field.value = '';"
            "field.dispatchEvent(new Event('input')); })()"
        )
        page.run(
            f"(() => {{ const list = document.querySelectorAll('{TABLE} select')[1];"
            "list.value = 'flex'; list.dispatchEvent(new Event('change')); })()"
        )
        assert set(column(page, 1)) == {"flex"}
        assert page.run(count) == "4 of 12 rows"

    def test_hover(self, page: Browser) -> None:
        spots = "#fig-lengths-attention-scaling .spot"
        texts = page.run(f"[...document.querySelectorAll('{spots}')].map(s => s.dataset.tip)")
        place = next(i for i, text in enumerate(texts) if "naive" in text and "2,048" in text)
        page.point_at(spots, place)
        assert page.run("document.getElementById('tip').hidden") is False
        shown = page.run("document.getElementById('tip').textContent")
        assert shown == texts[place]
        assert "median time (ms): 16" in shown
        page.point_at("h1")
        assert page.run("document.getElementById('tip').hidden") is True

    def test_zoom(self, page: Browser) -> None:
        figure = "#fig-lengths-attention-scaling"
        box = f"document.querySelector('{figure} svg').getAttribute('viewBox')"
        view = f"{box}.split(' ').map(Number)"
        whole = page.run(view)
        page.click(f"{figure} [data-zoom=in]")
        closer = page.run(view)
        assert closer[2] == pytest.approx(whole[2] / 1.6)
        assert closer[2] / closer[3] == pytest.approx(whole[2] / whole[3])
        page.click(f"{figure} [data-zoom=reset]")
        assert page.run(view) == pytest.approx(whole)

    def test_a_cell_leads_to_its_record(self, page: Browser, written: Path) -> None:
        page.type(f"{TABLE} input", "flex 2,048")
        page.click(f"{TABLE} tbody tr:not([hidden]) a")
        assert page.run("document.getElementById('record').open") is True
        text = page.run("document.getElementById('record').innerText")
        for words in ("flex", "seq_len", "2048", "NVIDIA H200", "median (ms)", "forward_backward"):
            assert words in text, words
        href = page.run("document.querySelector('#record a').getAttribute('href')")
        assert RecordStore(written.parent).read(written / href).case["attention"]["name"] == "flex"
        page.click("#close")
        assert page.run("document.getElementById('record').open") is False

    def test_an_address_leads_to_a_record(self, page: Browser) -> None:
        page.run("location.hash = '#r3'")
        assert page.run("document.getElementById('record').open") is True

    def test_light_and_dark(self, page: Browser) -> None:
        ground = "getComputedStyle(document.body).backgroundColor"
        ink = "getComputedStyle(document.querySelector('.plot svg text')).fill"
        assert page.run(ground) == "rgb(255, 255, 255)"
        assert page.run(ink) == "rgb(0, 0, 0)"
        page.prefer("dark")
        dark = page.run(ground)
        assert dark == "rgb(21, 24, 28)"
        assert page.run(ink) != "rgb(0, 0, 0)"
        page.click("#theme")
        assert page.run(ground) == "rgb(255, 255, 255)"

    def test_on_a_phone(self, page: Browser) -> None:
        """Nothing but tables and figures, in frames of their own, is wider than the screen."""
        page.resize(390, 844, mobile=True)
        assert page.run("document.documentElement.scrollWidth") <= 390
        assert page.run(f"document.querySelector('{TABLE} .scroll').clientWidth") <= 390
        size = "parseFloat(getComputedStyle(document.body).fontSize)"
        assert page.run(size) >= 14

    def test_print(self, page: Browser, tmp_path: Path) -> None:
        reader = need_program("pdftotext", "poppler-utils")
        page.prefer("dark")
        path = tmp_path / "printed.pdf"
        path.write_bytes(page.pdf())
        done = subprocess.run(
            [reader, "-layout", str(path), "-"], check=True, capture_output=True, text=True
        )
        text = " ".join(done.stdout.split())
        for words in ("Table 4.", "Figure 3.", "What is missing", "CUDA out of memory"):
            assert words in text, words
        assert "filter rows" not in text
        assert "forward (ms)" in text
        renderer = need_program("pdftoppm", "poppler-utils")
        first = ["-r", "30", "-gray", "-f", "1", "-l", "1"]
        subprocess.run([renderer, *first, str(path), str(tmp_path / "printed")], check=True)
        (image,) = tmp_path.glob("printed*.pgm")
        _, _, pixels = _gray(image)
        # Paper is white although the screen was dark.
        assert sum(value > 200 for value in pixels) > 0.7 * len(pixels)
