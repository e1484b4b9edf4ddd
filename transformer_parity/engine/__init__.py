"""Run two implementations in separate processes, compare their tensors, and decide on a verdict, for any model."""
