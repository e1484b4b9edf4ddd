"""The generic part of the checker, which contains nothing specific to the Transformer.

It runs two implementations in separate processes, compares their tensors, decides on a verdict, and reports the result.
"""
