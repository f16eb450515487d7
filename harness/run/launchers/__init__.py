"""The launchers, one file each: where cases can run."""
