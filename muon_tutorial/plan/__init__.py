"""The plan: pure data about matrices, ranks and moves. A plan holds no tensors and no process groups."""
