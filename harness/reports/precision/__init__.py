"""Audits of precision: dtypes, errors, ranges."""
