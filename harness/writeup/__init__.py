"""All tables and figures of results folders as one document: Markdown, LaTeX, PDF, HTML."""
