"""What notebook 13 uses: bills of both optimizers, published figures, waiting times, and more steps."""

from .. import names_in

__getattr__, __dir__ = names_in(__name__, "on_ranks trace_events late_rank costs exercises pictures")
