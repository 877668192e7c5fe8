"""The proof on a task: its pieces, and the whole of its short version (long; needs espeak-ng)."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from examples.proof.corpus import some
from examples.proof.features import HOP, read
from examples.proof.network import FrontEnd
from examples.proof.page import time_text, verdict
from examples.proof.rooms_and_noise import TEST_NOISES, TRAIN_NOISES, mixed
from examples.proof.scores import Interval, interval
from examples.proof.words import (
    BABBLE_VOICES,
    COMMANDS,
    LABELS,
    SAMPLES,
    TEST_VOICES,
    TRAIN_VOICES,
    utterances,
)

ROOT = Path(__file__).parents[2]


def test_nobody_and_no_noise_of_the_test_is_heard_before() -> None:
    assert not set(TRAIN_VOICES) & set(TEST_VOICES)
    assert not set(BABBLE_VOICES) & {*TRAIN_VOICES, *TEST_VOICES}
    assert not set(TRAIN_NOISES) & set(TEST_NOISES)


def test_a_draw_of_words_has_all_voices() -> None:
    """Every third of a list that goes round three voices would be one voice."""
    rng = np.random.default_rng(0)
    chosen = some(utterances(TEST_VOICES, rng), 3, rng)
    assert {word.voice for word in chosen} == set(TEST_VOICES)
    assert len(chosen) == len(COMMANDS) * len(LABELS)


@pytest.mark.parametrize("name", [*TRAIN_NOISES, *TEST_NOISES])
def test_noise_is_as_strong_as_the_ratio_says(name: str) -> None:
    rng = np.random.default_rng(1)
    speech = np.sin(np.arange(SAMPLES))
    noise = mixed(speech, {**TRAIN_NOISES, **TEST_NOISES}[name](rng), 5.0) - speech
    assert 10 * np.log10(np.mean(speech**2) / np.mean(noise**2)) == pytest.approx(5.0)


def test_an_interval_holds_the_mean_and_narrows_with_words() -> None:
    rng = np.random.default_rng(2)
    wide, narrow = (interval((rng.random((3, n)) < 0.7).astype(float)) for n in (20, 2000))
    assert wide.low < wide.mean < wide.high
    assert narrow.high - narrow.low < 0.3 * (wide.high - wide.low)


def test_words_follow_the_numbers() -> None:
    said = verdict({"a": Interval(0.1, 0.05, 0.2), "b": Interval(-0.1, -0.2, -0.05)})
    assert "first is better" in said and "first is worse" in said
    assert "no significant" in verdict({"c": Interval(0.1, -0.1, 0.3)})


@pytest.mark.long
@pytest.mark.skipif(shutil.which("espeak-ng") is None, reason="needs espeak-ng")
def test_the_short_version_runs_and_its_front_end_begins_as_the_job(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "examples.proof", "--quick", "--out", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=280)
    assert {"proof.md", "proof.svg", "proof_loudness.svg"} <= {p.name for p in tmp_path.iterdir()}
    assert len(json.loads((tmp_path / "loudness.json").read_text())) == 2
    features, samples = (read(tmp_path / name)["test"] for name in ("dau1997", "samples"))
    assert samples.values.shape[1:] == (HOP, SAMPLES // HOP)
    with torch.no_grad():
        made = FrontEnd()(samples.values[:8])
    worst = (made - features.values[:8]).abs().max() / features.values.abs().max()
    # Another order of float32's sums.
    assert worst < 1e-5


def test_the_time_of_the_whole_is_said_where_nothing_was_there_before() -> None:
    assert "The whole" not in time_text({"log-mel": 11.4}, None)
    told = time_text({"log-mel": 11.4, "dau1997": 17.0}, 279.0)
    assert told.endswith("11 s (log-mel), 17 s (dau1997). The whole program took 4.7 minutes.")
