"""The parts of the templates that ``parity init-pair`` writes: one header, and the toy model in each framework."""
