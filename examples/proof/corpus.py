"""The corpus: clips as FLAC files and a manifest with what is in each.

Training: every word by eight voices; a third clean, the others with noise of one of three kinds at
20 to 0 dB, half of all in a room. Test: three other voices, three other kinds of noise, longer
echoes; a third of the words, each at every ratio.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import soundfile

from examples.proof.rooms_and_noise import (
    TEST_NOISES,
    TRAIN_NOISES,
    babble,
    heard,
    mixed,
    room,
)
from examples.proof.words import (
    BABBLE_VOICES,
    RATE_HZ,
    TEST_VOICES,
    TRAIN_VOICES,
    Utterance,
    Wave,
    speak,
    utterances,
)

CLEAN = np.inf
TEST_SNRS_DB = (CLEAN, 20.0, 10.0, 5.0, 0.0, -5.0)
TRAIN_SNRS_DB = (20.0, 10.0, 5.0, 0.0)
# A clip's RMS of 0.05 is 74 dB SPL with the calibration of the jobs.
CLIP_RMS = 0.05


@dataclass(frozen=True)
class Size:
    """How much of everything: one utterance of so many."""

    train_every: int = 1
    test_every: int = 3


@dataclass(frozen=True)
class Clip:
    """One line of the manifest, and its samples."""

    split: str
    utterance: Utterance
    snr_db: float
    noise: str
    wave: Wave

    @property
    def name(self) -> str:
        """Its file's."""
        return f"{self.split}/{self.utterance.name}-{self.snr_db:g}dB.flac"


def write_corpus(folder: Path, size: Size, seed: int) -> Path:
    """Everything below a folder; the manifest's path."""
    rows: list[dict[str, object]] = []
    for clip in clips(size, np.random.default_rng(seed)):
        path = folder / clip.name
        path.parent.mkdir(parents=True, exist_ok=True)
        wave = clip.wave * CLIP_RMS / np.sqrt(np.mean(clip.wave**2))
        soundfile.write(path, np.clip(wave, -1, 1), RATE_HZ)
        rows.append(
            {
                "id": clip.name,
                "uri": clip.name,
                "split": clip.split,
                "label": clip.utterance.label,
                "language": clip.utterance.language,
                "voice": clip.utterance.voice,
                "snr_db": clip.snr_db,
                "noise": clip.noise,
            }
        )
    manifest = folder / "manifest.parquet"
    pq.write_table(pa.Table.from_pylist(rows), manifest)
    return manifest


def clips(size: Size, rng: np.random.Generator) -> Iterator[Clip]:
    """All of them, each drawn from the generator in turn."""
    wanted = some(utterances(TRAIN_VOICES, rng), size.train_every, rng)
    for utterance, speech in zip(wanted, speak(wanted), strict=True):
        yield _for_training(utterance, speech, rng)
    talk = babble(speak(some(utterances(BABBLE_VOICES, rng), 4, rng)))
    kinds = {**TEST_NOISES, "babble": talk}
    wanted = some(utterances(TEST_VOICES, rng), size.test_every, rng)
    for utterance, speech in zip(wanted, speak(wanted), strict=True):
        response = room(rng, 0.7) if rng.random() < 0.5 else None
        word = heard(speech, response)
        kind = str(rng.choice(sorted(kinds)))
        noise = kinds[kind](rng)
        for snr_db in TEST_SNRS_DB:
            wave = word if snr_db == CLEAN else mixed(word, noise, snr_db)
            yield Clip("test", utterance, snr_db, "" if snr_db == CLEAN else kind, wave)


def some(found: list[Utterance], every: int, rng: np.random.Generator) -> list[Utterance]:
    """One of `every`, drawn, in their order."""
    chosen = rng.permutation(len(found))[: len(found) // every]
    return [found[at] for at in sorted(chosen)]


def _for_training(utterance: Utterance, speech: Wave, rng: np.random.Generator) -> Clip:
    response = room(rng, rng.uniform(0.2, 0.5)) if rng.random() < 0.5 else None
    word = heard(speech, response)
    if rng.random() < 1 / 3:
        return Clip("train", utterance, CLEAN, "", word)
    kind = str(rng.choice(sorted(TRAIN_NOISES)))
    snr_db = float(rng.choice(TRAIN_SNRS_DB))
    return Clip("train", utterance, snr_db, kind, mixed(word, TRAIN_NOISES[kind](rng), snr_db))
