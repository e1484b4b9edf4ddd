"""Compare training on multiple devices with training on one device: cases, worker processes, and the comparison."""
