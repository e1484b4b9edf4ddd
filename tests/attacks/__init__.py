"""Attacks on the verdict AGREE through ports, files, options and the location of code, with the expected verdicts."""
