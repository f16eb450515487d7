"""Programs to be read, each runnable alone."""
