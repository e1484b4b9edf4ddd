"""A test of the checker: inject every known bug into every port, and see whether it is caught, located and named."""
