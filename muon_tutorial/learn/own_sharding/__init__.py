"""What notebook 11 uses: a config's three functions on real ranks, two traps, pictures, and exercises."""

from .. import names_in

__getattr__, __dir__ = names_in(__name__, "on_ranks transfers shared_work exercises pictures")
