"""PTX run on the host, in the place of a GPU: exact, checked, and fast enough for tests.

`parser` reads the text into what `ptx` has names for; `program` cuts it into pieces; `translate`,
with `body`, `arithmetic`, `conversion`, `memory` and `checks`, writes a function of the host for
each, which `compiled` compiles; `warp_wide` describes what a warp does together; `machine` runs the
grid; `launcher` is what the models see.
"""

from amtcore_interpreter.launcher import InterpretedLauncher, Profile

__all__ = ["InterpretedLauncher", "Profile"]
