"""``attnbench-writeup``: a paper on what results folders hold, and an appendix with all of it."""

from __future__ import annotations

import sys
from pathlib import Path

from harness.cases import format as fmt
from harness.commands.results_folder import OneLineParser, complain
from harness.printing import say, warn
from harness.render.figure import save
from harness.render.files import put
from harness.store.plain_json import readable_text
from harness.store.regular import require_inside
from harness.writeup.collecting import collect
from harness.writeup.document import Document, NumberedFigure, Section
from harness.writeup.html import to_html
from harness.writeup.latex import to_latex_appendix
from harness.writeup.latex_paper import to_latex_paper
from harness.writeup.markdown import to_markdown_document
from harness.writeup.pdf import LatexError, compile_pdf

COMMAND = "attnbench-writeup"


def main(arguments: list[str] | None = None) -> int:
    """Write both documents in every format; returns the exit code."""
    parser = OneLineParser(
        prog="attnbench-writeup",
        description="Write results folders as a paper (a figure, a table and a verdict for each "
        "question) and an appendix (everything): both as Markdown and LaTeX (and PDF, where a TeX "
        "is installed), and together as one self-contained HTML page. Nothing is measured, and "
        "records are only read.",
    )
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULTS", help="results folders")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FOLDER",
        help="where to write; by default the folder writeup in the first RESULTS",
    )
    options = parser.parse_args(arguments)
    folder: Path = options.output or options.results[0] / "writeup"
    try:
        document = collect(options.results)
        if options.output is None:
            for written in (folder, folder / "figures"):
                require_inside(written, options.results[0])
        paths = write_document(document, folder)
    except (ValueError, LatexError) as error:
        warn(error, command=COMMAND)
        return 2 if isinstance(error, ValueError) else 1
    except OSError as error:
        return complain(f"{folder}: cannot be written ({error})", COMMAND)
    for problem in document.problems:
        warn(problem, command=COMMAND)
    tables = sum(len(section.tables) for section in document.sections)
    figures = sum(len(section.figures) for section in document.sections)
    questions = fmt.counted(len(document.questions), "question")
    say(f"paper: {questions}")
    say(f"appendix: {len(document.sections)} sweeps, {tables} tables, {figures} figures")
    for path in paths:
        say(f"  {path}")
    if not any(path.suffix == ".pdf" for path in paths):
        say("  no PDF: pdflatex is not installed (apt-get install texlive-latex-recommended)")
    if document.gaps:
        count = len(document.gaps)
        words = "thing is missing; the document says how to make it"
        if count > 1:
            words = "things are missing; the document says how to make them"
        say(f"{count} {words}")
    return 0


def write_document(document: Document, folder: Path) -> list[Path]:
    """Write both documents in all formats into ``folder``; returns them, without their figures."""
    written: list[Path] = []
    pictures: dict[str, Path] = {}
    for section, figure in document.figures():
        pictures[figure.anchor] = _picture(figure, section, folder)
        put(folder / "figures" / f"{figure.anchor}.pdf", save(figure.drawn, "pdf"), [])
    for name in ("paper", "appendix"):
        text = to_markdown_document(name, document, folder, pictures)
        put(folder / f"{name}.md", readable_text(text).encode(), written)
    put(folder / "writeup.html", readable_text(to_html(document, folder)).encode(), written)
    for name, to_latex in (("paper", to_latex_paper), ("appendix", to_latex_appendix)):
        tex = folder / f"{name}.tex"
        put(tex, to_latex(document).encode(), written)
        pdf = compile_pdf(tex)
        if pdf is not None:
            written.append(pdf)
    return written


def _picture(figure: NumberedFigure, section: Section, folder: Path) -> Path:
    """The figure's PNG: the sweep's own, or a copy in ``folder``.

    There is a copy where the document lies outside the results folder, which it may leave without
    it, and where the sweep's file is not there or shows something else.
    """
    data = save(figure.drawn, "png")
    copy = folder / "figures" / f"{figure.anchor}.png"
    is_inside = section.results.resolve() in folder.resolve().parents
    if is_inside and figure.source.exists() and figure.source.read_bytes() == data:
        put(copy, None, [])
        return figure.source
    put(copy, data, [])
    return copy


if __name__ == "__main__":
    sys.exit(main())
