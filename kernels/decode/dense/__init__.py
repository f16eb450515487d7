"""Flash decode: attention of new tokens over cached keys and values, in one kernel."""
