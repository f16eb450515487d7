"""Predicted memory of attention over ranks: a walk through its passes that counts their tensors."""
