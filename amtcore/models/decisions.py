"""Decision stage of Paulick et al. (2024): from internal representations to answers.

A representation is a list over auditory channels of (batch, M_i, time) or (M_i, time), with a
different number M_i of modulation filters per channel. Every method states the statistic that it
computes: sums over time, filters and channels, through which gradients flow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from amtcore.arguments import Text
from amtcore.errors import ParameterError, ShapeError
from amtcore.plain_numbers import plain_number

Representation = Sequence[Tensor]
METRICS = ("rms", "mean", "max", "l2")
CRITERIA = ("greater", "less")
#: How an interval is chosen, and the comparison of the first with the second that it means.
RULES = {"max": "greater", "min": "less", "greater": "greater", "less": "less"}


def _check_channels(representation: Representation) -> None:
    if len(representation) == 0:
        raise ShapeError("expected a representation of one channel or more, got an empty list")


def _span(name: str, bounds: Sequence[float] | None, size: int, fs_hz: float = 0.0) -> slice:
    """Return the slice from start to end: whole numbers, or seconds where there is a rate."""
    if bounds is None:
        return slice(0, size)
    given = list(bounds) if isinstance(bounds, (tuple, list)) else []
    numbers = [n for n in map(plain_number, given) if n is not None and math.isfinite(n)]
    if len(given) != 2 or len(numbers) != 2 or not (fs_hz or all(n % 1 == 0 for n in numbers)):
        kind = "seconds" if fs_hz else "whole numbers"
        raise ParameterError(f"{name} must be a pair (start, end) of {kind}, got {bounds!r}")
    # 1.001 s at 4 kHz is sample 4004, though 1.001 * 4000 is a little less.
    start, end = (math.floor(round(n * (fs_hz or 1.0), 6)) for n in numbers)
    if not 0 <= start < end <= size:
        wanted = f"0..{size}, its end left out"
        if fs_hz:
            wanted = f"0..{size / fs_hz:g} s, one sample ({1 / fs_hz:g} s) or longer"
        got = f"{numbers[0]:g}..{numbers[1]:g}" + (" s" if fs_hz else "")
        raise ParameterError(f"{name} must be a range inside {wanted}, got {got}")
    return slice(start, end)


def _flat(representation: Representation) -> Tensor:
    return torch.cat([y.flatten(-2) for y in representation], -1)


def _weights(
    representation: Representation, of_channel: Tensor | None, of_filter: Tensor | None
) -> Tensor:
    """(filter,): the weight of every filter output, channel after channel."""
    counts = [y.shape[-2] for y in representation]
    like = representation[0]
    # Default weights need no check, and a check of weights on a GPU would wait for the device.
    given_some = of_channel is not None or of_filter is not None
    looked_at = given_some and like.device.type == "cpu"
    of_channel, of_filter = (
        like.new_ones(count) if given is None else torch.as_tensor(given).to(like.device)
        for given, count in ((of_channel, len(counts)), (of_filter, max(counts)))
    )
    if of_channel.shape != (len(counts),) or len(of_filter) < max(counts):
        raise ShapeError(
            f"expected {len(counts)} channel weights and at least {max(counts)} modulation "
            f"weights, got {tuple(of_channel.shape)} and {tuple(of_filter.shape)}"
        )
    pairs = zip(of_channel, counts, strict=True)
    weights = torch.cat([weight * of_filter[:count] for weight, count in pairs])
    if looked_at and not (bool((weights >= 0).all()) and float(weights.detach().sum()) > 0):
        raise ParameterError("weights must be 0 or more, and not all of them 0")
    return weights


def _difference(test: Representation, noise: Representation) -> list[Tensor]:
    batches = ((), (1,), tuple(test[0].shape[:-2]))
    same = [y.shape[-2:] for y in test] == [y.shape[-2:] for y in noise]
    if not same or tuple(noise[0].shape[:-2]) not in batches:
        raise ShapeError(
            "expected a noise as long as the signal, of the same batch or a batch of 1, got "
            f"representations {tuple(noise[0].shape)} and {tuple(test[0].shape)} in channel 0"
        )
    return [y - n for y, n in zip(test, noise, strict=True)]


class DecisionMethods:
    """Six methods from a representation, or from sounds, to an answer.

    A representation is what the model returns without stages, sampled at `fs_resampled`.
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
        """Return a region of a representation.

        Args:
            internal_repr: List over channels of (.., M_i, time).
            time_window: (start, end) in s: samples floor(start fs) up to floor(end fs) - 1.
            channel_range: (start, end) channels, the end left out.
            modulation_range: (start, end) modulation filters of every channel, the end left out; a
                channel with fewer keeps what it has of them.
        """
        _check_channels(internal_repr)
        channels = _span("channel_range", channel_range, len(internal_repr))
        chosen = list(internal_repr)[channels]
        time = _span("time_window", time_window, internal_repr[0].shape[-1], self.fs_resampled)
        filters = _span("modulation_range", modulation_range, max(y.shape[-2] for y in chosen))
        # Copies: a region that is kept must not keep the whole representation alive.
        return [y[..., filters, time].clone() for y in chosen]

    def template_correlation(
        self,
        internal_repr: Representation,
        template: Representation,
        normalize: bool = True,
    ) -> Tensor:
        """Return the correlation with a template, over all channels, filters and samples.

        Normalised: Pearson's r, sum of (x - mean x)(t - mean t) over the root of the product of the
        two sums of squares, 0 where either is constant. Otherwise: the inner product, sum of x t.

        Args:
            internal_repr: List over channels of (batch, M_i, time) or (M_i, time).
            template: Like `internal_repr`, with the same batch or a batch of 1.
            normalize: Whether to return Pearson's r.
        Returns:
            (batch,), or a scalar without a batch.
        """
        shapes = [[tuple(y.shape[-2:]) for y in each] for each in (internal_repr, template)]
        if shapes[0] != shapes[1]:
            raise ShapeError("the template must have the channels, filters and samples of the test")
        x, t = _flat(internal_repr), _flat(template)
        if normalize:
            x, t = (values - values.mean(-1, keepdim=True) for values in (x, t))
        product = (x * t).sum(-1)
        if not normalize:
            return product
        size = (x.square().sum(-1) * t.square().sum(-1)).clamp(min=torch.finfo(x.dtype).tiny).sqrt()
        return product / size

    def compute_decision_variable(
        self,
        internal_repr: Representation,
        metric: str = "rms",
        channel_weights: Tensor | None = None,
        modulation_weights: Tensor | None = None,
    ) -> Tensor:
        """Return one number for a representation.

        Each filter output y of n samples has the weight w = w_channel w_modulation, by default 1:

            rms   sqrt( sum of w mean(y^2) / sum of w )
            mean  sum of w mean(y) / sum of w
            max   largest w y
            l2    sqrt( sum of w sum(y^2) )

        Args:
            internal_repr: List over channels of (batch, M_i, time) or (M_i, time).
            metric: "rms", "mean", "max" or "l2".
            channel_weights: (channel,), 0 or more, which is checked on the CPU.
            modulation_weights: (filter,), likewise, at least as many as the longest channel has.
        Returns:
            (batch,), or a scalar without a batch.
        """
        _check_channels(internal_repr)
        Text(METRICS)("metric", metric)
        y = torch.cat(list(internal_repr), -2)  # (.., filter of any channel, time)
        weights = _weights(internal_repr, channel_weights, modulation_weights).to(y)
        if metric == "max":
            return (weights.unsqueeze(-1) * y).amax((-2, -1))
        if metric == "mean":
            return (weights * y.mean(-1)).sum(-1) / weights.sum()
        if metric == "l2":
            return (weights * y.square().sum(-1)).sum(-1).sqrt()
        return ((weights * y.square().mean(-1)).sum(-1) / weights.sum()).sqrt()

    def make_decision(
        self, decision_var: Tensor, threshold: float = 0.0, criterion: str = "greater"
    ) -> Tensor:
        """Return True if the variable is above ("greater") or below ("less") the threshold."""
        Text(CRITERIA)("criterion", criterion)
        return decision_var > threshold if criterion == "greater" else decision_var < threshold

    def detection_task(
        self,
        signal_audio: Tensor,
        noise_audio: Tensor | None = None,
        metric: str = "rms",
        threshold: float | None = None,
        return_decision_var: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Decide if there is a signal: its decision variable is above a threshold.

        Args:
            signal_audio: (batch, time) or (time,).
            noise_audio: The noise alone, with the same batch or a batch of 1; its representation is
                subtracted from the representation of the signal.
            metric: Metric of the decision variable.
            threshold: None returns the decision variable without a decision.
            return_decision_var: Whether to return (decisions, decision variable).
        """
        test = self._represent(signal_audio)
        if noise_audio is not None:
            test = _difference(test, self._represent(noise_audio))
        variable = self.compute_decision_variable(test, metric)
        if threshold is None:
            return variable
        answer = self.make_decision(variable, threshold)
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
        """Choose one of two intervals: True for the first.

        Args:
            stimulus1: First interval, (batch, time) or (time,).
            stimulus2: Second interval, likewise.
            metric: Metric of the decision variable.
            decision_rule: "max" (or "greater") chooses the interval with the larger variable, "min"
                (or "less") the interval with the smaller. Equal variables choose the second.
            return_decision_var: Whether to return (answer, difference of the variables).
            criterion: Another name of the metric, from the page's example. The answer is then the
                number of the chosen interval, 0 or 1 (int64, 0 for equal variables), not a bool.
        """
        rule = RULES[Text(RULES)("decision_rule", decision_rule)]
        first, second = (
            self.compute_decision_variable(self._represent(sound), criterion or metric)
            for sound in (stimulus1, stimulus2)
        )
        variable = first - second
        answer = self.make_decision(variable, 0.0, rule)
        if criterion is not None:
            opposite = "less" if rule == "greater" else "greater"
            answer = self.make_decision(variable, 0.0, opposite).to(torch.int64)
        return (answer, variable) if return_decision_var else answer

    def _represent(self, audio: Tensor) -> Representation:
        out = self(audio)  # type: ignore[operator]
        return out[0] if self.return_stages else out
