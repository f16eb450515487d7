"""Where each precision of a training step loses accuracy."""
