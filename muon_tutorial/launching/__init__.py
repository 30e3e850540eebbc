"""``launch()`` starts real ranks, watches and ends them; ``join_torchrun()`` joins ranks of torchrun."""
