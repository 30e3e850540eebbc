"""What notebook 01 uses: updates of a small GPT, a race of optimizers, their pictures, and the exercises."""

from .. import names_in

__getattr__, __dir__ = names_in(__name__, "updates exercises pictures race")
