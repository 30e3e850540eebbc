"""Predicts the seconds of a step: simulates it with the costs that a small file gives for the machine."""
