"""Run two implementations of any model in separate processes, compare their tensors, and decide on a verdict."""
