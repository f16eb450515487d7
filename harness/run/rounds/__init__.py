"""Rounds: whose turn it is, when compared cases are decided, and what goes into a record."""
