"""Results folders as a paper and an appendix: Markdown, LaTeX, PDF, and one HTML page of both."""
