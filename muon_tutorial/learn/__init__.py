"""The code of the lessons: it observes the optimizer, and starts no processes except a lesson's ranks.

=================  =========================================================================================
the_grid, …        a folder per notebook: what it runs on ranks, its pictures, its exercises
exercises          judge: checks answers and gives hints; on_real_ranks: the same for answers that ranks run
builds             runs the tests of exercises without a stub; reference: their solutions
pictures           picture: a self-contained ``<img>`` with alt text; holdings, spectra: shared drawings
widgets            controls that redraw a picture; answers that appear after a prediction
inputs             a small GPT and its recorded gradients; cores, memory and seconds of this machine
course             the lessons in order and their links; the glossary
lazy_names         the names of a lesson's files, imported when first asked for
=================  =========================================================================================
"""

from __future__ import annotations

from .course import glossary

__all__ = ["glossary"]
