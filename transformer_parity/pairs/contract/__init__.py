"""The contract of an implementation, and the tools for writing one."""
