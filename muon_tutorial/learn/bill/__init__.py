"""What notebook 10 uses: counted and predicted bills of a step, a boundary gather, rounding, exercises."""

from .. import names_in

__getattr__, __dir__ = names_in(__name__, "on_ranks costs rounding exercises pictures")
