"""How many tokens to draft, and whether it still pays."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from caramba_fast.infer.spec_config import SpeculativeConfig


@dataclass
class SpeculationStats:
    """What speculation has done in a run.

    Attributes:
        drafted, accepted: tokens over all rows.
        passes: passes of the target after the prompt.
        new_tokens: tokens these passes gave, over all rows.
        row_passes: passes times the rows that were alive in each.
        spec_k: tokens drafted per step at the end.
        disabled: why the run went on plainly, or None.
    """

    drafted: int = 0
    accepted: int = 0
    passes: int = 0
    new_tokens: int = 0
    row_passes: int = 0
    spec_k: int = 0
    disabled: str | None = None

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted tokens; nan before any was drafted."""
        return self.accepted / self.drafted if self.drafted else float("nan")

    @property
    def tokens_per_pass(self) -> float:
        """Tokens a row gets from one pass of the target; nan before the first."""
        return self.new_tokens / self.row_passes if self.row_passes else float("nan")

    def as_dict(self) -> dict[str, float | str | None]:
        """The figures by name."""
        return {
            **asdict(self),
            "acceptance_rate": self.acceptance_rate,
            "tokens_per_pass": self.tokens_per_pass,
        }


class DraftLength:
    """K, moved by the acceptance of each interval.

    Args:
        config: settings.
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        self._config = config
        self.stats = SpeculationStats(spec_k=config.spec_k)
        self._rounds, self._drafted, self._accepted = 0, 0, 0

    @property
    def k(self) -> int:
        """Tokens to draft next; 0 once speculation does not pay."""
        return 0 if self.stats.disabled else self.stats.spec_k

    def saw(self, drafted: int, accepted: int, new: int, rows: int) -> None:
        """One pass of the target verified ``drafted`` tokens of ``rows`` rows."""
        stats = self.stats
        stats.drafted += drafted
        stats.accepted += accepted
        stats.passes += 1
        stats.new_tokens += new
        stats.row_passes += rows
        self._drafted += drafted
        self._accepted += accepted
        self._rounds += drafted > 0
        if self._rounds == self._config.spec_k_interval:
            self._end_interval()

    def _end_interval(self) -> None:
        config, stats = self._config, self.stats
        if stats.acceptance_rate < config.spec_disable_below_accept:
            stats.disabled = (
                f"acceptance {stats.acceptance_rate:.2f} of {stats.drafted} drafted tokens is below "
                f"spec_disable_below_accept={config.spec_disable_below_accept}"
            )
        if config.spec_k_adaptive:
            grows = self._accepted >= config.spec_target_acceptance * self._drafted
            k = stats.spec_k + (1 if grows else -1)
            stats.spec_k = min(max(k, config.spec_k_min), config.spec_k_max)
        self._rounds, self._drafted, self._accepted = 0, 0, 0
