"""Tables and figures for cases of any task."""
