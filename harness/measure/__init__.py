"""One case on one rank: the numeric check, the calls and passes that are timed, timelines."""
