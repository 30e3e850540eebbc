"""What notebook 16 uses: a plain FSDP2 loop, its port, killed and resumed runs, pictures, exercises."""

from .. import names_in

__getattr__, __dir__ = names_in(__name__, "exercises lives port trials tiny_job pictures")
