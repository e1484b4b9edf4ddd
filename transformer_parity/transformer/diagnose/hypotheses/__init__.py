"""What a port might be doing instead: hypotheses, their places and combinations, and how they are tried."""
