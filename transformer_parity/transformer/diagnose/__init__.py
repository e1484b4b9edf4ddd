"""Diagnosis: where a difference starts, and which known mistake or convention explains it."""
