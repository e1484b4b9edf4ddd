"""What ``parity init-port`` writes: one port per framework, around our own package as a stand-in."""
