"""Which blocks of scores each rank computes, and the loops that compute them."""
