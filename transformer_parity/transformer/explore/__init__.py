"""Every tap of one sentence pair, in the reference and in several ports, as one page to look around in."""
