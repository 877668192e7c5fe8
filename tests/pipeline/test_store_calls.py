"""What every call to a store has in common: who is asked again, for how long, in whose words."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest

from earmill.pipeline.common.errors import CommitError, StorageError
from earmill.pipeline.common.retries import SILENT_TRIES, RetryPolicy, in_a_job, patient
from earmill.pipeline.storage import retrying
from earmill.pipeline.storage.retrying import storage_error, store_call


class Answer(Exception):
    """An HTTP answer, as a store's library raises it."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


class Backend:
    """Something that can be weakly referenced, as a backend is."""


@dataclass
class Layout:
    """A layout whose store gives scripted answers, the last one for ever."""

    script: list[Any]
    is_local: bool = False
    backend: Any = field(default_factory=Backend)
    asked: int = 0

    def url(self, rel: str = "") -> str:
        return f"s3://bucket/{rel}".rstrip("/")

    def answer(self) -> str:
        answer = self.script[min(self.asked, len(self.script) - 1)]
        self.asked += 1
        if isinstance(answer, BaseException):
            raise answer
        return str(answer)

    @store_call("read")
    def read(self, rel: str) -> str:
        return self.answer()

    @store_call("written", 1)
    def upload(self, local: str, rel: str) -> str:
        return self.answer()

    @store_call("cleared", None)
    def clear(self) -> str:
        return self.answer()


@pytest.fixture(autouse=True)
def time(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """A clock that only sleeping moves; how long was slept."""
    slept: list[float] = []

    def policy(budget_s: float) -> RetryPolicy:
        return RetryPolicy(
            budget_s, clock=lambda: sum(slept), sleep=slept.append, jitter=lambda: 1.0
        )

    monkeypatch.setattr(retrying, "RETRIES", policy(75.0))
    monkeypatch.setattr(retrying, "BRIEF", policy(2.0))
    yield slept


REFUSED = [FileNotFoundError("x"), FileExistsError("x")]


class TestAskedAgain:
    @pytest.mark.parametrize("status", [500, 503, 429, 408])
    def test_a_store_that_says_not_now(self, status: int, time: list[float]) -> None:
        layout = Layout([Answer(status), Answer(status), "content"])
        assert layout.read("a") == "content"
        assert layout.asked == 3
        assert time == [0.2, 0.4]

    @pytest.mark.parametrize("in_a_job", [True, False])
    def test_a_job_has_more_patience_than_a_command(
        self, in_a_job: bool, time: list[float]
    ) -> None:
        layout = Layout(["content", Answer(503)])
        layout.read("a")
        with ExitStack() as stack:
            if in_a_job:
                stack.enter_context(patient())
            with pytest.raises(StorageError):
                layout.read("a")
        low, high = (60.0, 75.0) if in_a_job else (1.0, 2.0)
        assert low < sum(time) <= high

    @pytest.mark.parametrize(("retry_s", "least", "most"), [(0.0, 0.0, 0.0), (300.0, 280.0, 300.0)])
    def test_a_job_sets_how_long(
        self, retry_s: float, least: float, most: float, time: list[float]
    ) -> None:
        layout = Layout(["content", Answer(503)])
        layout.read("a")
        with patient(retry_s), pytest.raises(StorageError):
            layout.read("a")
        assert least <= sum(time) <= most

    def test_patience_ends_with_the_job_even_after_an_error(self, time: list[float]) -> None:
        with pytest.raises(CommitError), patient(), patient():
            raise CommitError("no")
        assert not in_a_job()

    def test_a_store_that_never_answered_is_given_up_early(self, time: list[float]) -> None:
        """It is more likely a wrong address than a store that is down."""
        layout = Layout([ConnectionError("refused")])
        with patient(), pytest.raises(StorageError):
            layout.read("a")
        assert layout.asked == SILENT_TRIES

    def test_one_that_has_answered_is_not(self, time: list[float]) -> None:
        layout = Layout(["content", *[ConnectionError("refused")] * 8, "content"])
        layout.read("a")
        with patient():
            assert layout.read("a") == "content"
        assert layout.asked == 10

    def test_a_refusal_is_an_answer(self, time: list[float]) -> None:
        layout = Layout([Answer(403), *[ConnectionError("refused")] * 8, "content"])
        with pytest.raises(StorageError):
            layout.read("a")
        with patient():
            assert layout.read("a") == "content"

    def test_one_that_went_silent_has_to_answer_anew(self, time: list[float]) -> None:
        layout = Layout(["content", ConnectionError("refused")])
        layout.read("a")
        with patient():
            with pytest.raises(StorageError):
                layout.read("a")
            asked = layout.asked
            with pytest.raises(StorageError):
                layout.read("a")
        assert asked > SILENT_TRIES + 1
        assert layout.asked - asked == SILENT_TRIES

    @pytest.mark.parametrize("error", [Answer(503), OSError(errno.EIO, "x"), TimeoutError("x")])
    def test_a_local_disk_is_not_asked_twice(self, error: Exception, time: list[float]) -> None:
        layout = Layout([error, "content"], is_local=True)
        with patient(), pytest.raises(StorageError):
            layout.read("a")
        assert (layout.asked, time) == (1, [])

    @pytest.mark.parametrize("error", [Answer(403), Answer(404), PermissionError(13, "x")])
    def test_a_refusal_is_not_repeated(self, error: Exception, time: list[float]) -> None:
        layout = Layout([error, "content"])
        with patient(), pytest.raises(StorageError):
            layout.read("a")
        assert (layout.asked, time) == (1, [])


class TestWords:
    @pytest.mark.parametrize(
        ("call", "text"),
        [
            (lambda layout: layout.read("rows/x"), "s3://bucket/rows/x cannot be read: "),
            (lambda layout: layout.upload("/tmp/x", "rows/y"), "s3://bucket/rows/y cannot be wri"),
            (lambda layout: layout.clear(), "s3://bucket cannot be cleared: "),
        ],
    )
    def test_what_and_where(self, call: Callable[[Layout], Any], text: str) -> None:
        with pytest.raises(StorageError) as caught:
            call(Layout([Answer(403)]))
        assert str(caught.value).startswith(text)
        assert "\n" not in str(caught.value)
        assert isinstance(caught.value.__cause__, Answer)

    @pytest.mark.parametrize("error", [*REFUSED, CommitError("ours"), KeyError("a defect")])
    @pytest.mark.parametrize("is_local", [True, False])
    def test_what_is_no_failure_of_the_store_passes_as_it_is(
        self, error: Exception, is_local: bool
    ) -> None:
        with pytest.raises(type(error)) as caught:
            Layout([error], is_local=is_local).read("a")
        assert caught.value is error

    @pytest.mark.parametrize(("number", "reason"), retrying.REASONS.items())
    def test_a_disk_s_reason_in_plain_words(self, number: int, reason: str) -> None:
        layout = Layout([OSError(number, "words of the system")], is_local=True)
        with pytest.raises(StorageError, match=f"cannot be read: {reason.split('(')[0]}") as caught:
            layout.read("a")
        assert caught.value.errno == number

    def test_the_number_is_found_behind_a_wrapper(self) -> None:
        try:
            try:
                raise OSError(errno.ENOSPC, "full")
            except OSError as inner:
                raise RuntimeError("while writing") from inner
        except RuntimeError as error:
            found = storage_error("x cannot be written", error)
        assert found.errno == errno.ENOSPC
        assert str(found) == "x cannot be written: no space left on the device"

    def test_a_store_s_answer_has_no_number_of_the_system(self) -> None:
        """s3fs makes up an errno for an HTTP answer."""
        error = PermissionError(errno.EACCES, "Forbidden")
        error.__cause__ = Answer(403)
        found = storage_error("x cannot be read", error)
        assert found.errno is None
        assert "permission denied" not in str(found)

    @pytest.mark.parametrize(
        ("error", "transient"),
        [(Answer(503), True), (ConnectionError("x"), True), (Answer(403), False)],
    )
    def test_whether_it_may_pass(self, error: Exception, transient: bool) -> None:
        assert storage_error("x", error).transient is transient
