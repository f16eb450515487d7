"""Documents placed on ranks: packed batches in which a document is split only where it must be."""
