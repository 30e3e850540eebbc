"""The reader's own optimizer: answers kept in my_muon.py, completed by the reference, tried, and trained."""

from .. import names_in

__getattr__, __dir__ = names_in(__name__, "keep", "blocks", "on_ranks", "finale", "scores")
