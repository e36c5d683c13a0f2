"""The decode plan: which part of a cache is read, and in what pieces, by how much it holds.

Sits on `caramba_fast.cache.AttentionLimits`, which every read of a cache honours; a plan only picks one.
"""

from __future__ import annotations

import sys

from caramba_fast.cache import AttentionLimits
from caramba_fast.infer.policy_fields import DecodePlanFields

#: Query tokens taken at a time by "auto" where none are set. Scores of a piece are q_chunk times what is
#: cached, so the chunk shrinks as the cache grows; 256 is what the op does by itself.
DEFAULT_Q_CHUNKS = {"short": 256, "mid": 256, "long": 128}
_SUFFIXES = {"short": "", "mid": "_mid", "long": "_long"}


class DecodePlan:
    """The plan of one run, resolved from its settings.

    "auto" never narrows what is attended to by itself: a window changes the answer, so there is one only in
    a bucket for which one was set, or where the model has one of its own.

    Args:
        settings: what was asked for.
    """

    def __init__(self, settings: DecodePlanFields) -> None:
        self.settings = settings
        #: One object a bucket, so that a recorded step sees by identity that nothing changed.
        self._reaches = {name: self._reach(name) for name in self._names()}

    def _names(self) -> tuple[str, ...]:
        plan = self.settings.decode_plan
        return tuple(_SUFFIXES) if plan == "auto" else (plan,)

    def _reach(self, bucket: str) -> AttentionLimits:
        settings = self.settings
        if bucket == "none":
            return AttentionLimits()
        suffix = _SUFFIXES.get(bucket, "")
        q_chunk = getattr(settings, f"decode_q_chunk{suffix}")
        if q_chunk is None:
            q_chunk = DEFAULT_Q_CHUNKS.get(bucket)
        return AttentionLimits(q_chunk, getattr(settings, f"decode_local_window{suffix}"), bucket)

    def bucket(self, length: int) -> str:
        """short, mid or long with "auto", else the plan's name."""
        settings = self.settings
        if settings.decode_plan != "auto":
            return settings.decode_plan
        if length <= settings.decode_bucket_short:
            return "short"
        return "mid" if length <= settings.decode_bucket_mid else "long"

    def plan_for(self, length: int) -> AttentionLimits:
        """What holds for a read of ``length`` tokens, new ones included; rows of a batch: the longest.

        Returns the same object whenever the bucket is the same.

        Raises:
            ValueError: a negative length.
        """
        if length < 0:
            raise ValueError(f"length is {length}; 0 or more is allowed")
        return self._reaches[self.bucket(length)]

    def lengths_like(self, length: int) -> range:
        """The lengths around ``length`` for which `plan_for` says the same."""
        settings = self.settings
        bounds: tuple[int, ...] = ()
        if settings.decode_plan == "auto":
            bounds = (settings.decode_bucket_short, settings.decode_bucket_mid)
        start = max((bound + 1 for bound in bounds if bound < length), default=0)
        stop = min((bound + 1 for bound in bounds if bound >= length), default=sys.maxsize)
        return range(start, stop)

    def describe(self) -> dict[str, object]:
        """The plan in force, for the report of a run: JSON types."""
        settings = self.settings
        found: dict[str, object] = {"decode_plan": settings.decode_plan}
        if settings.decode_plan == "auto":
            found["decode_bucket_short"] = settings.decode_bucket_short
            found["decode_bucket_mid"] = settings.decode_bucket_mid
        limits = {
            name: {"q_chunk": reach.q_chunk, "local_window": reach.local_window}
            for name, reach in self._reaches.items()
            if name != "none"
        }
        return {**found, "reach": limits} if limits else found

    def __str__(self) -> str:
        """The plan in one line."""
        if self.settings.decode_plan == "none":
            return "decode_plan none: the layers' defaults"
        parts = []
        for name, reach in self._reaches.items():
            window = "whole cache" if reach.local_window is None else f"window {reach.local_window}"
            chunk = "default" if reach.q_chunk is None else reach.q_chunk
            parts.append(f"{name}: {window}, q_chunk {chunk}")
        return f"decode_plan {self.settings.decode_plan}: " + "; ".join(parts)


def plan_for(settings: DecodePlanFields, length: int) -> AttentionLimits:
    """`DecodePlan.plan_for`, for a single question."""
    return DecodePlan(settings).plan_for(length)
