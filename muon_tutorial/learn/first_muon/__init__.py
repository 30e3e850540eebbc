"""What notebook 04 uses: the first distributed Muon on real ranks, its pictures, exercises and cost."""

from .. import names_in

__getattr__, __dir__ = names_in(__name__, "on_ranks exercises pictures")
