"""From a command line to typed cases, to a plan, to a session that runs and reports."""
