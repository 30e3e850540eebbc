"""What notebook 02 uses: Newton–Schulz on singular values, its cost, pictures, and exercises."""

from .. import names_in

__getattr__, __dir__ = names_in(__name__, "singular_values exercises pictures")
