"""From samples to specific loudness in one kernel, see `fused.loudness`."""

from amtcore.kernels.fused.loudness_runner import Frames as Frames
from amtcore.kernels.fused.loudness_runner import Prepared as Prepared
