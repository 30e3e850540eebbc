"""What notebook 06 uses: a grid of real ranks, its groups and their calls, pictures and exercises."""

from .. import names_in

__getattr__, __dir__ = names_in(__name__, "on_ranks exercises pictures")
