"""What notebook 12 uses: loops that prefetch, a missing wait, pipelines, timelines, and exercises."""

from .. import names_in

__getattr__, __dir__ = names_in(__name__, "loops on_ranks missing_wait pipelines steps exercises pictures")
