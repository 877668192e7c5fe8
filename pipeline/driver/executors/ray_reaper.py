"""Ends a private Ray with its driver: kills what is left of it and removes its folder.

Started by path with the folder as argument, with a pipe from the driver as standard input. The
pipe ends when the driver closes it or is gone, however it went. A process is part of that Ray if it
was started with the folder in its environment, or is a Ray worker that writes its log there;
nothing else is touched. Imports nothing of the package: it must start at once.
"""

from __future__ import annotations

import shutil
import signal
import sys
import time
from collections.abc import Collection

import psutil

MARK = "EARMILL_RAY_FOLDER"
KERNEL_PID = 2
ROUNDS = 10
ROUND_S = 1.0
# A process has no environment to read until the system has set it up.
STARTING_S = 5.0
LOOK_AGAIN_S = 0.05


def members(folder: str, spare: Collection[int]) -> list[psutil.Process]:
    """Processes of the Ray in this folder; those that are just being started are waited for."""
    until = time.monotonic() + STARTING_S
    while True:
        found, starting = [], False
        for process in psutil.process_iter():
            try:
                # In this order: what has an environment by the second question has it for good.
                starting = _is_starting(process) or starting
                if process.pid not in spare and _belongs(process, folder):
                    found.append(process)
            except psutil.Error:
                continue
        if found or not starting or time.monotonic() > until:
            return found
        time.sleep(LOOK_AGAIN_S)


def _is_starting(process: psutil.Process) -> bool:
    """Whether a process is too young to say whose it is; the kernel's own never say."""
    if time.time() - process.create_time() > STARTING_S or process.ppid() in (0, KERNEL_PID):
        return False
    return process.status() != psutil.STATUS_ZOMBIE and not process.environ()


def _belongs(process: psutil.Process, folder: str) -> bool:
    if process.status() == psutil.STATUS_ZOMBIE:
        return False
    if process.environ().get(MARK) == folder:
        return True
    # A worker's title is written over its environment.
    titled = any(argument.startswith("ray::") for argument in process.cmdline()[:1])
    return titled and any(file.path.startswith(f"{folder}/") for file in process.open_files())


def reap(folder: str, spare: Collection[int]) -> None:
    """Kill the processes of the Ray in this folder, then remove it."""
    for _ in range(ROUNDS):
        found = members(folder, spare)
        for process in found:
            try:
                process.kill()
            except psutil.Error:
                continue
        if not found:
            break
        psutil.wait_procs(found, timeout=ROUND_S)
    shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Wait for the driver's end, then clear up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    folder, driver_pid = sys.argv[1], int(sys.argv[2])
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.read()
    reap(folder, {psutil.Process().pid, driver_pid})


if __name__ == "__main__":
    main()
