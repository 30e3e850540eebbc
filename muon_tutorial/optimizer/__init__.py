"""The optimizers that users construct, and the making of their steps; ``guard/`` has the checks."""
