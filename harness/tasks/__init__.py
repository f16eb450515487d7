"""The tasks: what can be measured. ``lengths`` and ``batch`` make the inputs that several share."""
