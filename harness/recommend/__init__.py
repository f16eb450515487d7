"""Recommends how to train: combinations enumerated, fitted, predicted, the best few measured."""
