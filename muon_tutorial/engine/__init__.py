"""The requests that a generator may make of a world, and their order. This folder knows no process group."""
