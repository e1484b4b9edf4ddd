"""Every implementation behind one protocol: the four packages, and ports written by users."""
