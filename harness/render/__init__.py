"""Tables and figures as types, and their files: CSV, Markdown, LaTeX, PNG, SVG, a report."""
