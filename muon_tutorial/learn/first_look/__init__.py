"""What notebook 00 uses: a matrix on real ranks, its exercises, and the step as a film."""

from .. import names_in

__getattr__, __dir__ = names_in(__name__, "on_ranks pictures exercises")
