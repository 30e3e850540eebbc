"""What lesson 15 uses: broken files, their runs on real ranks, an oracle, tools to find the wrong line."""

from .. import names_in

__getattr__, __dir__ = names_in(__name__, "on_ranks evidence training_rank loop exercises pictures")
