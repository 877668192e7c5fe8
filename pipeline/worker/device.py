"""The GPU of a worker: found, described, given clips, and what its errors mean to a job.

Nothing here knows shards. What computes on the GPU is the extractor that was built for its backend;
`DeviceInput` brings clips there, and resamples them where the job's resampler can do that.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from earmill.pipeline.common.errors import DeviceError, DeviceLost
from earmill.pipeline.common.machine import INTERPRETED, is_interpreted, processor_name
from earmill.pipeline.common.text import one_line
from earmill.pipeline.worker.launch_batches import LAUNCH_BYTES, DeviceFull
from earmill.pipeline.worker.prepare import Clip, Unresampled

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# What the kernel module of NVIDIA's driver says; torch and libcuda know only its CUDA.
DRIVER_VERSION = "/sys/module/nvidia/version"


@dataclass(frozen=True)
class Gpu:
    """What a worker computes on in place of its CPU.

    Args:
        backend: What extractors are built for: cuda, or interpreted.
        device: Where their tensors lie.
    """

    backend: str
    device: torch.device

    def launch_bytes(self) -> int:
        """Samples of a launch that leave room for a second one, for what they become, and for
        others on the same device."""
        if self.device.type != "cuda":
            return LAUNCH_BYTES
        import torch

        free, _ = torch.cuda.mem_get_info(self.device)
        return min(LAUNCH_BYTES, free // 8)

    def describe(self) -> dict[str, Any]:
        """What provenance records of it."""
        from amtcore.kernels.warp.driver.device_facts import device_facts

        kind = {"device": "cuda", "backend": self.backend}
        if self.device.type != "cuda":
            return kind | {"name": f"interpreter on {processor_name()}", "driver": None}
        facts = device_facts(self.device)
        return kind | {
            "name": facts.name,
            "capability": "{}.{}".format(*facts.capability),
            "driver": nvidia_driver(),
            "driver_cuda": "{}.{}".format(*facts.driver_cuda),
        }


class GpuUnusable(DeviceError):
    """There is no GPU, or none that can run the models; a CPU can.

    Args:
        reason: Why, and what to do about it.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"run.device: expected a GPU that works, got none: {reason}; or set run.device to auto "
            "or cpu"
        )
        self.reason = reason


def check_gpu() -> None:
    """Whether this machine has a GPU, without taking any of its memory.

    Raises:
        GpuUnusable: It has none.
    """
    if is_interpreted():
        return
    from amtcore.kernels.warp.driver.available import why_no_gpu

    if reason := why_no_gpu():
        raise GpuUnusable(reason)


def find_gpu() -> Gpu:
    """The GPU of this process, or what stands in for it.

    Raises:
        GpuUnusable: There is none that works; one line that says why and what to do.
    """
    import torch

    check_gpu()
    if is_interpreted():
        return Gpu(INTERPRETED, torch.device("cpu"))
    from amtcore.errors import BackendError
    from amtcore.kernels.warp.driver.available import find_device

    try:
        return Gpu("cuda", find_device("cuda"))
    except BackendError as error:
        raise GpuUnusable(one_line(error)) from error


def choose_gpu(wanted: str) -> tuple[Gpu | None, str]:
    """What a worker of `run.device` computes on, None for its CPU; and why it is the CPU, if that
    is news.

    Raises:
        GpuUnusable: It wants a GPU, and there is none that works.
    """
    if wanted == "cpu":
        return None, ""
    try:
        return find_gpu(), ""
    except GpuUnusable as error:
        if wanted == "cuda":
            raise
        return None, f"the models run on CPU: {error.reason}"


def nvidia_driver() -> str | None:
    """Version of the driver, as the kernel module says it; None where that cannot be read."""
    try:
        with open(DRIVER_VERSION, encoding="ascii") as file:
            return file.read().strip()
    except (OSError, UnicodeDecodeError):
        return None


def exact_convolutions() -> None:
    """Float32 as it is, and one algorithm for one shape: torch would round the factors of a
    convolution, and if told so of a product, to 10 bits. For the whole process, as torch knows it
    no other way."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True


@contextmanager
def device_errors(doing: str) -> Iterator[None]:
    """What the device's errors are to a job: a launch that was too large, or a lost worker."""
    from amtcore.errors import DeviceLostError, DeviceMemoryError
    from amtcore.kernels.warp.driver.failures import device_errors as of_torch

    try:
        with of_torch(doing):
            yield
    except DeviceMemoryError as error:
        raise DeviceFull(one_line(error)) from error
    except DeviceLostError as error:
        raise DeviceLost(f"the GPU was lost: {one_line(error)}") from error


class DeviceInput:
    """Brings clips to a device; for several threads at once, each on a stream of its own.

    Args:
        gpu: Where to.
    """

    def __init__(self, gpu: Gpu) -> None:
        from earmill.pipeline.audio.sinc_resample import DeviceResampler

        self._gpu = gpu
        if gpu.device.type == "cuda":
            exact_convolutions()
        self.resampler = DeviceResampler(gpu.device)
        self._of_thread = threading.local()

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Inside, this thread's work on the device is in its own order, beside that of others."""
        import torch

        with ExitStack() as inside:
            if self._gpu.device.type == "cuda":
                if not hasattr(self._of_thread, "stream"):
                    self._of_thread.stream = torch.cuda.Stream(self._gpu.device)
                inside.enter_context(torch.cuda.stream(self._of_thread.stream))
            yield

    def signals(self, clips: Sequence[Clip]) -> list[list[Any]]:
        """Model by model what it is given of each clip: arrays as they are, and tensors where the
        device resamples. A clip's values do not depend on the others.
        """
        import torch

        by_model = [list(of_model) for of_model in zip(*(c.signals for c in clips), strict=True)]
        wanted = [one for row in by_model for one in row if isinstance(one, Unresampled)]
        if not wanted:
            return by_model
        with torch.no_grad():
            made = self._resampled(wanted)
            found = [[made.get(id(one), one) for one in row] for row in by_model]
        if self._gpu.device.type == "cuda":
            # The extractor has streams of its own.
            torch.cuda.current_stream().synchronize()
        return found

    def _resampled(self, wanted: Sequence[Unresampled]) -> dict[int, Tensor]:
        """By identity, what the models asked for; samples move once, whoever asks for them."""
        arrays = {id(one.ears): one.ears for one in wanted}
        moved = dict(zip(arrays, self._moved([*arrays.values()]), strict=True))
        at_rate: dict[tuple[int, float], Tensor] = {}
        for from_hz, to_hz in dict.fromkeys((one.from_hz, one.to_hz) for one in wanted):
            of_pair = [one for one in wanted if (one.from_hz, one.to_hz) == (from_hz, to_hz)]
            keys = list(dict.fromkeys(id(one.ears) for one in of_pair))
            made = self.resampler([moved[key] for key in keys], from_hz, to_hz)
            at_rate |= {(key, to_hz): ears for key, ears in zip(keys, made, strict=True)}
        return {id(one): _as_model_input(at_rate[id(one.ears), one.to_hz], one) for one in wanted}

    def _moved(self, arrays: Sequence[np.ndarray[Any, Any]]) -> list[Tensor]:
        """The arrays on the device, in one copy from pinned memory."""
        import torch

        if self._gpu.device.type != "cuda":
            return [torch.from_numpy(array) for array in arrays]
        pinned = torch.empty(sum(array.size for array in arrays), pin_memory=True)
        np.concatenate([array.ravel() for array in arrays], out=pinned.numpy())
        parts = pinned.to(self._gpu.device, non_blocking=True).split([a.size for a in arrays])
        return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]


def as_array(signal: Any) -> Any:
    """What a model on the processor is given of a signal that was made on the device."""
    return signal if isinstance(signal, np.ndarray) else signal.cpu().numpy()


def _as_model_input(ears: Tensor, wanted: Unresampled) -> Tensor:
    """As `channels.as_model_input` and `prepare.scaled` do it with arrays, to the last bit."""
    import torch

    if len(ears) == 1:
        signal = ears[0]
    elif wanted.ears_of_model == len(ears):
        signal = ears
    else:
        signal = ((ears[0].double() + ears[1].double()) / 2).float()
    return signal if wanted.gain == 1.0 else signal * torch.tensor(wanted.gain).float().item()
