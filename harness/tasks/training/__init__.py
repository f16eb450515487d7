"""A training step of the transformer, on one rank or many."""
