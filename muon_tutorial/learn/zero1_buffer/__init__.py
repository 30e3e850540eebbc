"""What notebook 05 uses: matrices in buckets, their ranges, rulers, exercises, and steps on real ranks."""

from .. import names_in

__getattr__, __dir__ = names_in(__name__, "on_ranks exercises pictures")
