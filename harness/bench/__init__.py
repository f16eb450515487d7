"""What measures on one rank: clocks, memory, device state, launches, traffic, traces."""
