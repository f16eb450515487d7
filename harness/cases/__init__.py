"""What can be measured: cases, tasks and profilers as types, sweeps, hardware, table columns."""
