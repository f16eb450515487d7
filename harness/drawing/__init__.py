"""Parts of figures: panels, bars, labels at the ends of lines, and the marks of tables."""
