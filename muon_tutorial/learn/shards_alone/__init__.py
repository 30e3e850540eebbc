"""What notebook 08 uses: a gradient's shards, orthogonalized alone or gathered; heat maps; exercises."""

from .. import names_in

__getattr__, __dir__ = names_in(__name__, "cuts on_ranks exercises directions pictures")
