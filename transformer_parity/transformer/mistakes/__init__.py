"""Known mistakes, as data: what each changes in a port, and where the comparison must find it."""
