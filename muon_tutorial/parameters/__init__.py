"""Describes parameters as the plan's matrices, and reads how they are cut."""
