"""What notebook 07 uses: two weights that tp cuts, the buffer that dp cuts, a weight of three matrices."""

from .. import names_in

__getattr__, __dir__ = names_in(__name__, "on_ranks qkv exercises pictures")
