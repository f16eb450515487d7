"""Tables and figures of memory over a step and at its peak."""
