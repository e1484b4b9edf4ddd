"""The ports that ``parity init-port`` writes. Each wraps the package of this repository for one framework."""
