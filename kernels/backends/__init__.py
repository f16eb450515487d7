"""Attention backends, one file per choice of ``attention=`` on one device."""
