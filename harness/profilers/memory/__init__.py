"""Memory profiles: every allocation of one step, as a timeline by category."""
