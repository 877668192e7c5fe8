"""Kernels on a real GPU: the driver by ctypes, with the context, memory and stream of torch.

    library (functions, signatures) -> failures (codes to errors) -> modules (PTX to functions)
                                    -> available (why there is no GPU) -> launcher -> probe
                                                                       -> device_facts

Nothing is opened when it is imported. Nothing is installed for it: libcuda comes with the system's
driver, the rest with torch. It may import `launching`, and nothing else of the kernels.
"""

from amtcore.kernels.warp.driver.launcher import CudaLauncher

__all__ = ["CudaLauncher"]
