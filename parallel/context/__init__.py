"""Context parallelism: attention over ranks that hold parts of each sequence."""
