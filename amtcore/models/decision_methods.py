"""The decision stage as methods of a model; the statistics themselves are in `decisions`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from amtcore.models import decisions
from amtcore.models.decisions import Representation


class DecisionMethods:
    """Six methods from a representation, or from sounds, to an answer.

    A model that has them gives `fs_resampled`, the sampling rate of its representation, and
    `return_stages`; a representation is what it returns, without the stages.
    """

    fs_resampled: Any
    return_stages: bool

    def roi_selection(
        self,
        internal_repr: Representation,
        time_window: tuple[float, float] | None = None,
        channel_range: tuple[int, int] | None = None,
        modulation_range: tuple[int, int] | None = None,
    ) -> list[Tensor]:
        """A region in time (s), channels and modulation filters; see `decisions.roi_selection`."""
        return decisions.roi_selection(
            internal_repr, self.fs_resampled, time_window, channel_range, modulation_range
        )

    def template_correlation(
        self, internal_repr: Representation, template: Representation, normalize: bool = True
    ) -> Tensor:
        """Pearson's r, or the inner product; see `decisions.template_correlation`."""
        return decisions.template_correlation(internal_repr, template, normalize)

    def compute_decision_variable(
        self,
        internal_repr: Representation,
        metric: str = "rms",
        channel_weights: Tensor | None = None,
        modulation_weights: Tensor | None = None,
    ) -> Tensor:
        """Weighted rms, mean, max or l2; see `decisions.decision_variable`."""
        return decisions.decision_variable(
            internal_repr, metric, channel_weights, modulation_weights
        )

    def make_decision(
        self, decision_var: Tensor, threshold: float = 0.0, criterion: str = "greater"
    ) -> Tensor:
        """Whether the variable is above or below the threshold; see `decisions.make_decision`."""
        return decisions.make_decision(decision_var, threshold, criterion)

    def detection_task(
        self,
        signal_audio: Tensor,
        noise_audio: Tensor | None = None,
        metric: str = "rms",
        threshold: float | None = None,
        return_decision_var: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Is there a signal: is the decision variable of its representation above a threshold?

        Args:
            signal_audio: (batch, time) or (time,).
            noise_audio: The noise alone, with the same batch or a batch of 1: its representation
                is subtracted from the signal's, so that what is left is the signal's own.
            metric: Of the decision variable.
            threshold: None returns the decision variable itself: there is no decision.
            return_decision_var: Whether to return (decisions, decision variable).
        """
        test = self._represent(signal_audio)
        if noise_audio is not None:
            test = decisions.difference(test, self._represent(noise_audio))
        variable = decisions.decision_variable(test, metric)
        if threshold is None:
            return variable
        answer = decisions.make_decision(variable, threshold)
        return (answer, variable) if return_decision_var else answer

    def discrimination_task(
        self,
        stimulus1: Tensor,
        stimulus2: Tensor,
        metric: str = "rms",
        decision_rule: str = "max",
        return_decision_var: bool = False,
        criterion: str | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Which of two intervals is chosen: True where it is the first.

        Args:
            stimulus1: First interval, (batch, time) or (time,).
            stimulus2: Second interval, likewise.
            metric: Of the decision variable.
            decision_rule: "max" (or "greater") chooses the interval with the larger variable,
                "min" (or "less") that with the smaller. Where they are equal it is the second.
            return_decision_var: Whether to return (answer, variable of the first less that of the
                second).
            criterion: The page's example: the metric under this name asks for the chosen interval
                as a number, 0 or 1 (int64, 0 where they are equal), instead of a bool.
        """
        rule = decisions.decision_rule(decision_rule)
        first, second = (
            decisions.decision_variable(self._represent(sound), criterion or metric)
            for sound in (stimulus1, stimulus2)
        )
        variable = first - second
        answer = decisions.make_decision(variable, 0.0, rule)
        if criterion is not None:
            opposite = "less" if rule == "greater" else "greater"
            answer = decisions.make_decision(variable, 0.0, opposite).to(torch.int64)
        return (answer, variable) if return_decision_var else answer

    def _represent(self, audio: Tensor) -> Representation:
        out = self(audio)  # type: ignore[operator]
        return out[0] if self.return_stages else out
