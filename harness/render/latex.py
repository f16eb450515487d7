r"""A table as LaTeX: compiles as it stands, and can be \input into a paper.

A paper has begun its document by the time it inputs the file, and the guard at the top then
skips the preamble; it needs booktabs and graphicx (and longtable for long tables) loaded.
"""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache
from itertools import groupby

from harness.cases import format as fmt
from harness.escapes import printable
from harness.render.table import Column, Table

LONG_TABLE_ROWS = 40
"""More rows than this do not fit a page, and longtable breaks them over several."""

A4_LENGTH_MM = 297

CHARACTER_MM, COLUMN_GAP_MM = 1.5, 2.2
"""A generous estimate of the width of a letter in a table, and of the space of a column."""

_ESCAPES = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        "{": r"\{",
        "}": r"\}",
        "%": r"\%",
        "_": r"\_",
        "&": r"\&",
        "#": r"\#",
        "$": r"\$",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "|": r"\textbar{}",
        '"': "''",
        "\n": " ",
        fmt.PLUS_MINUS: r"$\pm$",
        fmt.TIMES: r"$\times$",
        fmt.ABSENT: r"\textendash{}",
        fmt.DAGGER: r"\dag{}",
        fmt.DOUBLE_DAGGER: r"\ddag{}",
        fmt.SECTION: r"\S{}",
        fmt.PILCROW: r"\P{}",
        fmt.DOUBLE_BAR: r"$\Vert$",
        fmt.DIAMOND: r"$\diamond$",
        fmt.TRIANGLE: r"$\triangle$",
        fmt.OPEN_TRIANGLE_DOWN: r"$\bigtriangledown$",
        fmt.CIRCLED_SLASH: r"$\oslash$",
        fmt.STAR: r"$\star$",
        "µ": r"$\mu$",
        "…": r"\ldots{}",
        "—": r"\textemdash{}",
        "−": "$-$",  # noqa: RUF001 - the minus sign
        "·": r"\textperiodcentered{}",
        "°": r"\textdegree{}",
        "≤": r"$\leq$",
        "≥": r"$\geq$",
        "≈": r"$\approx$",
        "→": r"$\rightarrow$",
        "√": r"$\surd$",
        "∞": r"$\infty$",
    }
)

_ACCENTS = dict(zip("\u0300\u0301\u0302\u0303\u0308\u030a\u030c\u0327", "`'^~\"rvc", strict=True))
"""Combining marks, and the commands that set their letter under them."""

_GREEK = frozenset(
    (
        *("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa"),
        *("lambda", "mu", "nu", "xi", "pi", "rho", "sigma", "tau", "upsilon", "phi", "chi"),
        *("psi", "omega", "Gamma", "Delta", "Theta", "Lambda", "Xi", "Pi", "Sigma", "Upsilon"),
        *("Phi", "Psi", "Omega"),
    )
)
"""Greek letters that have commands; the other capitals look like Latin ones."""

_JOINED = re.compile("-(?=-)")
"""A hyphen that would become a dash with the next one."""

_PREAMBLE = r"""% Compiles as it stands, and in a paper that loads booktabs, graphicx and longtable.
% Over both columns of a paper: \def\attnbenchfloat{table*} before \input.
\ifx\attnbenchfloat\undefined\def\attnbenchfloat{table}\fi
\expandafter\ifx\csname @nodocument\endcsname\relax
  \let\attnbenchend\relax
\else
  \documentclass{article}
  \usepackage[T1]{fontenc}
  \usepackage[paperwidth=PAPER_WIDTHmm,paperheight=210mm,margin=15mm]{geometry}
  \usepackage{booktabs,graphicx,longtable}
  \pagestyle{empty}
  \begin{document}
  \def\attnbenchend{\end{document}}
\fi
"""


@lru_cache(maxsize=100_000)
def escape(text: str) -> str:
    """Text as LaTeX: nothing in it is a command, and all of it is ASCII.

    Two hyphens stay two, which would be joined to a dash; a character without a command shows its
    code.
    """
    escaped = _JOINED.sub("-{}", printable(text).translate(_ESCAPES))
    if escaped.isascii():
        return escaped
    return "".join(
        character if character.isascii() else _command(character) for character in escaped
    )


def _command(character: str) -> str:
    """A character beyond ASCII as LaTeX: a power, an index, a Greek or an accented letter."""
    kind, _, plain = unicodedata.decomposition(character).rpartition("> ")
    if kind in ("<super", "<sub"):
        command = "textsuperscript" if kind == "<super" else "textsubscript"
        return rf"\{command}{{{escape(_letters(plain))}}}"
    greek = re.fullmatch(r"GREEK (SMALL|CAPITAL) LETTER (\w+)", unicodedata.name(character, ""))
    if greek:
        name = greek[2].lower().replace("lamda", "lambda")
        name = name if greek[1] == "SMALL" else name.capitalize()
        if name in _GREEK:
            return rf"$\{name}$"
    letters = _letters(plain)
    if len(letters) == 2 and letters[0].isascii() and letters[1] in _ACCENTS:
        return rf"\{_ACCENTS[letters[1]]}{{{letters[0]}}}"
    return f"(U+{ord(character):04X})"


def _letters(codes: str) -> str:
    return "".join(chr(int(code, 16)) for code in codes.split())


def to_latex(table: Table) -> str:
    """The whole file: guarded preamble, and a table or longtable with caption and label."""
    if len(table.rows) <= LONG_TABLE_ROWS:
        body, width_mm = _floating(table), A4_LENGTH_MM
    else:
        # A longtable cannot be scaled, so the page of the file on its own grows instead.
        body, width_mm = _long(table), max(A4_LENGTH_MM, _width_mm(table))
    preamble = _PREAMBLE.replace("PAPER_WIDTH", str(width_mm))
    return f"{preamble}{body}\\attnbenchend\n"


def _width_mm(table: Table) -> int:
    """Generous estimate of the width of a longtable with its margins."""
    headers = [column.header for column in table.columns]
    widths = [max(map(len, texts)) for texts in zip(headers, *table.cells(), strict=True)]
    return 30 + round(sum(CHARACTER_MM * width + COLUMN_GAP_MM for width in widths))


def _floating(table: Table) -> str:
    return "\n".join(
        [
            r"\begin{\attnbenchfloat}[htbp]",
            r"\centering",
            rf"\caption{{{escape(table.caption)}}}",
            rf"\label{{tab:{_label(table)}}}",
            r"\par\smallskip",
            # Shrunk only if it is wider than the page it lands on.
            r"\sbox0{\small",
            "\n".join(tabular(table.columns, table.cells())) + "}",
            r"\ifdim\wd0>\linewidth \resizebox{\linewidth}{!}{\usebox0}\else\usebox0\fi",
            *(rf"\par\smallskip{{\footnotesize {escape(note)}}}" for note in table.footnotes),
            r"\end{\attnbenchfloat}",
            "",
        ]
    )


def tabular(columns: list[Column], cells: list[list[str]]) -> list[str]:
    """The lines of a tabular over some columns of some rows."""
    return [
        rf"\begin{{tabular}}{{{_alignment(columns)}}}",
        r"\toprule",
        *_header(columns),
        r"\midrule",
        *_body(cells),
        r"\bottomrule",
        r"\end{tabular}",
    ]


def _long(table: Table) -> str:
    header = [*_header(table.columns), r"\midrule"]
    return "\n".join(
        [
            # A longtable needs one column, and pages of its own where the paper has two.
            r"\expandafter\ifx\csname if@twocolumn\expandafter\endcsname\csname iftrue\endcsname",
            r"  \onecolumn\def\attnbenchcolumns{\twocolumn}%",
            r"\else\let\attnbenchcolumns\relax\fi",
            r"\begingroup\scriptsize\setlength{\tabcolsep}{3pt}",
            rf"\begin{{longtable}}{{{_alignment(table.columns)}}}",
            rf"\caption{{{escape(table.caption)}}}\label{{tab:{_label(table)}}}\\",
            r"\toprule",
            *header,
            r"\endfirsthead",
            r"\toprule",
            *header,
            r"\endhead",
            r"\bottomrule",
            r"\endfoot",
            *_body(table.cells()),
            r"\end{longtable}",
            *(rf"\noindent {escape(note)}\par" for note in table.footnotes),
            r"\endgroup\attnbenchcolumns",
            "",
        ]
    )


def _label(table: Table) -> str:
    return table.name.replace("_", "-")


def _alignment(columns: list[Column]) -> str:
    return "".join("l" if column.align == "left" else "r" for column in columns)


def _header(columns: list[Column]) -> list[str]:
    lines = []
    if any(column.group for column in columns):
        cells, rules, start = [], [], 1
        for group, members in groupby(columns, key=lambda column: column.group):
            width = len(list(members))
            if group:
                cells.append(rf"\multicolumn{{{width}}}{{c}}{{{escape(group)}}}")
                rules.append(rf"\cmidrule(lr){{{start}-{start + width - 1}}}")
            else:
                cells.append("&".join([""] * width))
            start += width
        lines += [" & ".join(cells) + r" \\", "".join(rules)]
    lines.append(" & ".join(escape(column.header) for column in columns) + r" \\")
    return lines


def _body(cells: list[list[str]]) -> list[str]:
    return [" & ".join(map(escape, row)) + r" \\" for row in cells]
