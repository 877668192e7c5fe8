"""Session-wide fixtures: what computes, one Ray instance, fixed seeds, no stray environment."""

from __future__ import annotations

import functools
import gc
import os
import signal
import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.short import drawn

# Collecting this distribution would put it on the path of all tests; one test does so by itself.
collect_ignore = ["plugin_distribution"]
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
# Ray's workers give way to everybody else: beside other tests they would stand still.
os.environ.setdefault("RAY_worker_niceness", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
settings.register_profile("tests", drawn(100))
settings.load_profile("tests")
# Imported modules and collected tests stay: collections as often as usual take a tenth of a run.
# Before the first test they take a second, and find little.
gc.set_threshold(10_000)
gc.disable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put tests on Ray last. From the first of them on, Ray's idle processes take 5 % of a core."""
    items.sort(key=_is_on_ray)


def _is_on_ray(item: pytest.Item) -> bool:
    """Return True if a test, or the value of one of its parameters, asks for `ray_session`."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    return "ray_session" in getattr(item, "fixturenames", ()) or parameters.get("_on") == "ray"


def pytest_collection_finish() -> None:
    """Make once what tests only read.

    A full garbage collection took 0.3 s to walk imported modules and collected tests. Typer made
    the command line again for each command, which took 0.08 s.
    """
    if typer := sys.modules.get("typer.main"):
        once = functools.cache(typer.get_command)
        pytest.MonkeyPatch().setattr(typer, "get_command", once)
    gc.freeze()
    gc.enable()


# What a shell starts in the background ignores Ctrl-C, and so would all that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# What nohup starts ignores SIGHUP. A handler that does nothing does the same here, and is not
# inherited by what tests start.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--backend interpreted`: the operators of CPU tensors run on it."""
    parser.addoption("--backend", default="cpu", help="what computes: cpu or interpreted")


@pytest.fixture(scope="session", autouse=True)
def _computing(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.config.getoption("--backend") == "cpu":
        yield
        return
    from amtcore.kernels.devices import use_backend

    with use_backend(request.config.getoption("--backend")):
        yield


@pytest.fixture(autouse=True)
def _drawn_alike() -> None:
    """Seed torch and numpy, so that a test draws the same numbers whatever ran before.

    torch.manual_seed formats the call stack for each device that is not initialised, which takes
    longer than many tests.
    """
    if torch := sys.modules.get("torch"):
        torch.default_generator.manual_seed(0)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(0)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """One local Ray instance for the whole test session, on loopback, without a dashboard."""
    import ray

    ray.init(
        num_cpus=3,
        include_dashboard=False,
        configure_logging=False,
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
    )
    yield
    ray.shutdown()
