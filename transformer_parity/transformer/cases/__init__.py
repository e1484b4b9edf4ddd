"""The cases for comparing ports: configs, weights, and inputs that expose bugs."""
