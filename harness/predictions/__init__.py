"""Memory and time by formula, before anything is measured."""
