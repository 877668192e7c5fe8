"""How long a shard may take, and what the driver does about one that takes longer.

Before any shard is done the limit is generous (a slow model on a slow machine must not be killed);
with three done it follows the observed rate. Past the limit an idle worker runs a second copy,
which is safe because only one of them can commit; past twice the limit the worker is called hung.
"""

from __future__ import annotations

from bisect import insort

# Start-up, compilation and slow storage, whatever the audio.
BASE_S = 300.0
# Before any rate was seen: ten times slower than real time still counts as work.
WALL_PER_AUDIO_S = 10.0
# With rates seen: this many times the median.
OVER_MEDIAN = 20.0
RATES_NEEDED = 3
HUNG_FACTOR = 2.0


class Deadlines:
    """Limits for shards, learned from the shards before.

    Args:
        fixed_s: The job's own limit for every shard; None derives it from the audio.
        row_s: How long a row may take; rows together have as much as each alone.
    """

    def __init__(self, fixed_s: float | None = None, row_s: float | None = None) -> None:
        self._fixed_s, self._row_s = fixed_s, row_s
        # In order, so that asking for each of many workers costs no sorting.
        self._wall_per_audio: list[float] = []

    @property
    def least_s(self) -> float:
        """No shard's time is up before, whatever its audio."""
        least_s = BASE_S if self._fixed_s is None else self._fixed_s
        return least_s if self._row_s is None else min(least_s, self._row_s)

    def learn(self, wall_s: float, audio_s: float) -> None:
        """A shard of `audio_s` took `wall_s`."""
        if audio_s > 0:
            insort(self._wall_per_audio, wall_s / audio_s)

    def limit_s(self, audio_s: float) -> float:
        """When a second copy may be started."""
        if self._fixed_s is not None:
            return self._fixed_s
        per_audio_s = WALL_PER_AUDIO_S
        if len(self._wall_per_audio) >= RATES_NEEDED:
            per_audio_s = OVER_MEDIAN * self._median()
        return BASE_S + per_audio_s * audio_s

    def hung_s(self, audio_s: float, rows: int) -> float:
        """When the worker is killed; with one row, when that row is at fault."""
        hung_s = HUNG_FACTOR * self.limit_s(audio_s)
        return hung_s if self._row_s is None else min(hung_s, self._row_s * rows)

    def _median(self) -> float:
        rates = self._wall_per_audio
        return (rates[(len(rates) - 1) // 2] + rates[len(rates) // 2]) / 2
