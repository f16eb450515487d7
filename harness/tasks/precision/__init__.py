"""The accuracy of each precision: sums, and every tensor of a training step."""
