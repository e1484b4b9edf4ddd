"""The cases that a port is compared on: configs, weights and inputs in which no mistake can hide."""
