"""The choices of ``profile=``: where the time and the memory of a step go."""
