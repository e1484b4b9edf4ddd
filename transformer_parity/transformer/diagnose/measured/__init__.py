"""Numbers that are measured from a port instead of searched for: rates, moments, and the limits of searches."""
