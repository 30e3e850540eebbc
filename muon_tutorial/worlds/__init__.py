"""Worlds answer the requests of generators."""
