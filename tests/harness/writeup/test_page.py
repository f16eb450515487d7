"""The page of a small results folder, in a headless browser."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, find_browser
from programs import need, need_program
from writeup_examples import gray

from harness.store.record import RecordStore
from harness.writeup.document import Document
from harness.writeup.html import to_html


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


def wait_for(page: Browser, expression: str) -> Any:
    """The value of an expression once it is true; the page unpacks what it holds meanwhile."""
    deadline = time.monotonic() + 120
    while not (value := page.run(expression)):
        assert time.monotonic() < deadline, expression
        time.sleep(0.02)
    return value


def show(page: Browser, figure: str) -> None:
    """Bring a figure into view, which unpacks it."""
    page.run(f"document.querySelector('{figure}').scrollIntoView()")
    wait_for(page, f"document.querySelector('{figure} svg') !== null")


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
        show(page, "#fig-lengths-attention-scaling")
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
        show(page, figure)
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
        assert wait_for(page, "document.getElementById('record').open") is True
        text = page.run("document.getElementById('record').innerText")
        for words in ("flex", "seq_len", "2048", "NVIDIA H200", "median (ms)", "forward_backward"):
            assert words in text, words
        href = page.run("document.querySelector('#record a').getAttribute('href')")
        assert RecordStore(written.parent).read(written / href).case["attention"]["name"] == "flex"
        page.click("#close")
        assert page.run("document.getElementById('record').open") is False

    def test_an_address_leads_to_a_record(self, page: Browser) -> None:
        page.run("location.hash = '#r3'")
        assert wait_for(page, "document.getElementById('record').open") is True

    def test_light_and_dark(self, page: Browser) -> None:
        ground = "getComputedStyle(document.body).backgroundColor"
        show(page, "#fig-lengths-attention-scaling")
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
        page.run("document.querySelector('main p').append('a_name_of_a_case_'.repeat(9))")
        assert page.run("document.documentElement.scrollWidth") <= 390

    def test_contents_beside_the_page_and_over_it(self, page: Browser) -> None:
        links = page.run("[...document.querySelectorAll('#contents a')].map(a => a.hash.slice(1))")
        assert {"paper", "limits", "appendix", "sweep-lengths", "missing"} <= set(links)
        assert all(page.run(f"document.getElementById('{name}') !== null") for name in links)
        shown = "getComputedStyle(document.getElementById('side')).visibility"
        assert page.run(shown) == "visible"
        page.click("#contents a[href='#sweep-steps']")
        assert wait_for(
            page,
            "Math.abs(document.getElementById('sweep-steps').getBoundingClientRect().top) < 80",
        )
        page.resize(390, 844, mobile=True)
        assert page.run(shown) == "hidden"
        page.click("#menu")
        assert page.run(shown) == "visible"
        page.click("#contents a[href='#limits']")
        assert page.run(shown) == "hidden"

    def test_search_finds_the_tables_and_filters_them(self, page: Browser) -> None:
        page.type("#search", "naive 1,024")
        first = "document.querySelector('#hits a[href=\\'#tab-lengths-attention-summary\\']')"
        assert wait_for(page, f"{first} !== null")
        assert page.run(f"{first}.parentElement.querySelector('.count').textContent") == "1 rows"
        page.run(f"{first}.click()")
        assert column(page, 0) == ["1,024"]
        page.run(
            "(() => { const field = document.getElementById('search'); field.value = 'no such';"
            "field.dispatchEvent(new Event('input')); })()"
        )
        wait_for(page, "document.getElementById('hits').textContent.includes('no table')")

    def test_figures_wait_until_they_are_near(self, page: Browser) -> None:
        """The page holds them compressed, and the one in view is drawn."""
        assert page.run("document.querySelectorAll('.canvas[data-packed]').length") >= 1
        show(page, "#paper figure.plot")

    def test_print(self, page: Browser, tmp_path: Path) -> None:
        reader = need_program("pdftotext", "poppler-utils")
        page.run("window.drawAll().then(() => { window.drawn = true; }), true")
        wait_for(page, "window.drawn === true")
        page.prefer("dark")
        path = tmp_path / "printed.pdf"
        path.write_bytes(page.pdf())
        done = subprocess.run(
            [reader, "-layout", str(path), "-"], check=True, capture_output=True, text=True
        )
        text = " ".join(done.stdout.split())
        for words in ("Table A4.", "Figure A3.", "What is missing", "CUDA out of memory"):
            assert words in text, words
        assert "filter rows" not in text
        assert "forward (ms)" in text
        renderer = need_program("pdftoppm", "poppler-utils")
        first = ["-r", "30", "-gray", "-f", "1", "-l", "1"]
        subprocess.run([renderer, *first, str(path), str(tmp_path / "printed")], check=True)
        (image,) = tmp_path.glob("printed*.pgm")
        _, _, pixels = gray(image)
        # Paper is white although the screen was dark.
        assert sum(value > 200 for value in pixels) > 0.7 * len(pixels)
