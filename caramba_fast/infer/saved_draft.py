"""SavesDraft: sessions on disk of a generator with a draft.

The draft model's cache and random numbers are saved beside the target's, so that it guesses what it would have guessed.
A file without them is good as well: the draft reads the tokens anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from torch import Tensor

from caramba_fast.infer.drafts import Draft, ModelDraft
from caramba_fast.infer.saved import SavableGenerator, SavedSession
from caramba_fast.infer.saved_part import (
    SavedPart,
    opened,
    part_of,
    part_problems,
    random_of,
    random_problem,
)


class SavesDraft(SavableGenerator):
    """What `SpeculativeGenerator` saves beside what a `Generator` does."""

    _draft: Draft
    _draft_generator: SavableGenerator | None

    def _saved_draft(self, tensors: dict[str, Tensor]) -> SavedPart | None:
        generator = self._draft_generator
        if generator is None or generator.cache is None:
            return None
        return part_of(generator, "draft", cast(ModelDraft, self._draft).rng, tensors)

    def _check_draft(self, saved: SavedSession) -> list[str]:
        part, generator = saved.about.draft, self._draft_generator
        if part is None or generator is None:
            return []
        found = part_problems(generator, part, saved.tensors, "draft")
        if part.random is not None and self.config.seed in (None, saved.about.seed):
            found += random_problem(generator, part, saved.tensors.get("draft.random"))
        return found

    def _opened_draft(self, saved: SavedSession) -> Callable[[], None]:
        part, generator = saved.about.draft, self._draft_generator
        if part is None or generator is None:
            return self._draft.reset
        draft = cast(ModelDraft, self._draft)
        cache, rows = opened(generator, part, "draft", saved.tensors)
        rng = draft.rng
        if part.random is not None and self.config.seed in (None, saved.about.seed):
            rng = random_of(generator, part, saved.tensors["draft.random"])

        def take() -> None:
            draft.session.go_back(cache, rows)
            draft.rng = rng

        return take
