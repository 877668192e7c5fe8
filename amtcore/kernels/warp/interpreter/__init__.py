"""PTX run on the host, in the place of a GPU: exact, checked, and fast enough for tests.

`ptx` reads the text, `program` cuts it into pieces, `translate` (with `body`, `arithmetic`,
`conversion`, `memory`) writes a function of the host for each and `compiled` compiles it,
`warp_wide` describes what a warp does together, `machine` runs the grid, `launcher` is what the
models see.
"""

from amtcore.kernels.warp.interpreter.launcher import InterpretedLauncher, Profile

__all__ = ["InterpretedLauncher", "Profile"]
