"""Stores a results folder's records, finished rounds and sweep plans."""
