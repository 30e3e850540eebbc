"""Every recipe of ``scripts/recipes``, started by its host's own launcher, and compared with one process."""
