"""Mutation test of the checker: inject every known bug into every port, and check that it is found and identified."""
