"""The paper as LaTeX: question after question, each with its verdict, figure and table."""

from __future__ import annotations

from collections.abc import Iterator

from harness.render.latex import escape
from harness.writeup.document import Document, NumberedFigure, NumberedTable, Question
from harness.writeup.latex import PREAMBLE, figure_lines, fitted, paragraphs
from harness.writeup.words import Words, notes_of, short, words_of

FIGURE_HEIGHT = 0.17
"""Greatest height of a figure, over that of the text: figure and table share a page."""

TALL_HEIGHT = 0.22
"""The same for a figure that is nearly as high as it is wide, and would become too small."""

TALL = 0.66
"""Height over width of such a figure."""

ROOM_MM = 32
"""Room for a heading, a verdict and a caption."""

HEADING_MM = 12
"""Room for a theme's heading."""

ROW_MM = 3.3
"""Height of a row of a table."""

_LAYOUT = r"""
\geometry{margin=15mm,bottom=18mm}
\usepackage{caption}
\captionsetup{font=scriptsize,labelfont=bf,skip=2pt}
\setlength{\intextsep}{4pt plus 2pt}
\newcommand{\room}[1]{\par\penalty-100\begingroup
  \dimen0=\pagegoal\advance\dimen0-\pagetotal
  \ifdim#1>\dimen0\ifdim\dimen0>0pt\vfil\fi\break\fi\endgroup}
"""


def to_latex_paper(document: Document) -> str:
    """The whole file; figures are expected as ``figures/ANCHOR.pdf``."""
    words = words_of(document)
    lines = [PREAMBLE, _LAYOUT]
    lines += [r"\begin{document}", rf"{{\centering\LARGE {escape(words.title)}\par}}\medskip"]
    lines += [escape(words.question), r"\par"]
    lines += [rf"\textbf{{Unreadable:}} {escape(problem)}\par" for problem in document.problems]
    lines += _answer(document)
    lines += [r"\section*{Environment}", escape(words.scope), r"\par"]
    values = (rf"\textit{{{escape(name)}}}: {escape(value)}" for name, value in words.environment)
    lines.append(rf"{{\small\raggedright {'; '.join(values)}.\par}}")
    lines += [r"\section*{Method in brief}", r"{\small", *paragraphs(words.method), "}"]
    for theme in document.themes:
        for place, question in enumerate(theme.questions):
            lines.append(_room_for(question, is_first=not place))
            if not place:
                lines.append(rf"\section{{{escape(theme.title)}}}")
            lines += _question(question)
    lines += [r"\section*{Limits}", r"{\small", *paragraphs(words.limits), "}"]
    lines += [r"\section*{Marks in the tables}", r"{\small", *_marks(words), "}"]
    lines.append(r"\end{document}")
    return "\n".join(lines) + "\n"


def _answer(document: Document) -> Iterator[str]:
    answers = list(document.short_answer())
    if not answers:
        return
    yield r"\section*{Short answer}"
    yield r"\begin{itemize}\setlength{\itemsep}{0pt}\setlength{\parskip}{1pt}"
    for question in answers:
        theme, words = escape(question.theme), escape(question.verdict)
        yield rf"\item \textbf{{{theme}.}} {words} (Section~\ref{{{question.anchor}}})"
    yield r"\end{itemize}"


def _question(question: Question) -> Iterator[str]:
    yield rf"\subsection{{{escape(question.question)}}}\label{{{question.anchor}}}"
    if question.verdict:
        yield rf"\textbf{{Verdict.}} {escape(question.verdict)}\par"
    if question.figure is not None:
        caption = short(question.figure.drawn.caption)
        yield from figure_lines(question.figure, _height(question.figure), caption)
    if question.table is not None:
        yield from _table(question.table, question)


def _room_for(question: Question, *, is_first: bool) -> str:
    """Begins a new page where the question's figure, or its first rows, would stand on another."""
    height, room_mm = 0.0, ROOM_MM + (HEADING_MM if is_first else 0.0)
    if question.figure is not None:
        height = _height(question.figure)
    elif question.table is not None:
        room_mm += ROW_MM * len(question.table.table.rows)
    return rf"\room{{\dimexpr {room_mm:.0f}mm+{height}\textheight\relax}}"


def _height(figure: NumberedFigure) -> float:
    """The greatest height that a figure may have, over that of the text."""
    width, height = figure.drawn.figure.get_size_inches()
    return TALL_HEIGHT if height / width > TALL else FIGURE_HEIGHT


def _table(item: NumberedTable, question: Question) -> Iterator[str]:
    yield r"\begin{table}[H]\centering"
    yield rf"\caption{{{escape(short(item.table.caption))}}}\label{{{item.anchor}}}"
    yield from fitted(item.table.columns, item.table.cells(), size="scriptsize")
    notes = notes_of(item, question.rows_left)
    if notes:
        yield rf"\par\smallskip\begin{{minipage}}{{\linewidth}}\scriptsize {escape(notes)}"
        yield r"\end{minipage}"
    yield r"\end{table}"


def _marks(words: Words) -> Iterator[str]:
    if not words.marks:
        yield "None."
        return
    yield r"\begin{itemize}\setlength{\itemsep}{0pt}\setlength{\parskip}{1pt}"
    yield from (rf"\item {escape(mark)}" for mark in words.marks)
    yield r"\end{itemize}"
