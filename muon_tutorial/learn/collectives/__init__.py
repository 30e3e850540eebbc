"""What notebook 03 uses: collectives run message by message on real ranks, pictures and exercises."""

from .. import names_in

__getattr__, __dir__ = names_in(__name__, "on_ranks messages exercises pictures")
