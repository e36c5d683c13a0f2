"""Sessions on disk: what a generator holds goes to one file, and a generator goes on from it with the very same tokens.

A file has the tokens, the stored bytes of the cache in use, where the random numbers are, and what all of that
depends on: the model's digest, the layout of its cache, how it is stored and read. Nothing is encoded again, and a
file that does not fit is refused before anything changes.

The cache and random numbers of a draft model are saved beside the target's, so that it guesses what it would have
guessed. A file without them is good as well: the draft reads the tokens anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from caramba_fast.cache.sealed import Sealed, SealedFileError, is_sealed, read_sealed, write_sealed
from caramba_fast.config.files import check_replaceable, explain, shown
from caramba_fast.infer.config import AUTO, GenerateConfig, SpeculativeConfig
from caramba_fast.infer.drafts import Draft, ModelDraft
from caramba_fast.infer.fields import CacheFields
from caramba_fast.infer.policy_fields import DecodePlanFields
from caramba_fast.infer.saved_part import (
    SavedPart,
    SessionError,
    opened,
    part_of,
    part_problems,
    random_of,
    random_problem,
)
from caramba_fast.infer.stepwise import StepwiseGenerator
from caramba_fast.models.identity import AdaptersInUse

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from caramba_fast.infer.options import LoadOptions

#: Version 2 may have bytes of q4_channel that two channels divide; 1 has nibbles, which read alike.
WHAT, VERSION = "session", 2
#: Settings that a session is begun and continued with, unless others are given.
KEPT = {*CacheFields.model_fields, *DecodePlanFields.model_fields} - {
    "compile",
    "cuda_graph",
    "max_seq_len",
}
#: Of these the ones that may not be others: they say what of the cache is read.
FIXED = [name for name in sorted(DecodePlanFields.model_fields) if "q_chunk" not in name]


class _About(BaseModel):
    """What a file says of its tensors.

    Attributes:
        settings: of the cache, and how it is read.
        seed: what random numbers began with.
        expanded: whether a call for several answers has multiplied the rows.
        target, draft: what the models hold.
        notes: of whoever saved it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    settings: dict[str, Any]
    seed: int | None
    expanded: bool
    target: SavedPart
    draft: SavedPart | None
    notes: dict[str, Any]


class SavedSession(NamedTuple):
    """A file that was read, and is whole."""

    path: Path
    about: _About
    tensors: dict[str, Tensor]


def read_session(path: str | Path) -> SavedSession:
    """What a file holds.

    Raises:
        SessionError: no session, one of a newer format, or not as it was written.
        OSError: it cannot be read.
    """
    try:
        found: Sealed = read_sealed(path, WHAT, VERSION)
        return SavedSession(Path(path), _About.model_validate(found.about), found.tensors)
    except SealedFileError as error:
        raise SessionError(str(error)) from None
    except ValidationError as error:
        raise SessionError(f"{path} is no session: {explain(error)[:200]}") from None


class SavableGenerator(StepwiseGenerator):
    """A `StepwiseGenerator` whose conversation can be put into a file, and gone on with."""

    _draft: Draft | None = None
    _draft_generator: SavableGenerator | None = None

    def save(
        self,
        path: str | Path,
        *,
        notes: Mapping[str, Any] | None = None,
        force: bool = False,
    ) -> None:
        """Writes the conversation to a file, whole or not at all.

        The file has the tokens, the cache as it is stored (bytes in use alone), the state of random numbers that
        were given a ``seed``, and a checksum; it is not encrypted.

        Args:
            path: the file; an earlier session there is replaced.
            notes: whatever JSON can say; `resume` returns it.
            force: replace whatever file is there.

        Raises:
            RuntimeError: there is no conversation yet, or a `generate_iter` is under way.
            TypeError: a model that cannot be told from another, such as one of several ranks; notes that are no JSON.
            FileExistsError: a file of another kind is there.
            OSError: it cannot be written; what was there is untouched.
        """
        if self._run_state is not None:
            raise RuntimeError("a generation is under way; end or close its iterator, then save")
        if self.cache is None:
            raise RuntimeError("there is no conversation to save yet; feed a prompt first")
        check_replaceable(path, WHAT, partial(is_sealed, what=WHAT), force=force)
        tensors: dict[str, Tensor] = {}
        settings = self.config.model_dump(mode="json", include=KEPT)
        settings["cache"] = self.config.cache_name
        if self.cache_plan is not None:
            settings["cache"] = self.cache_plan.spec
        about = _About(
            settings=settings,
            seed=self.config.seed,
            expanded=self._expanded,
            target=part_of(self, "target", self._rng, tensors),
            draft=self._saved_draft(tensors),
            notes=dict(notes or {}),
        )
        write_sealed(path, WHAT, VERSION, about.model_dump(), tensors)

    @classmethod
    def load(
        cls,
        path: str | Path,
        model: Any,
        *,
        config: GenerateConfig | None = None,
        **options: Unpack[LoadOptions],
    ) -> Self:
        """A generator that goes on where a saved one stood: with the tokens that one would have given.

        Args:
            path: a file that `save` wrote.
            model: the model it was saved with.
            config: settings; what they leave open of the cache is as in the file, and so are random numbers without a
                ``seed``. What they give must agree with it; ``max_seq_len`` may be any that has room, and is by
                default 2048, or twice the tokens in the file.
            options: fields of the config, and arguments of the class such as ``tokenizer`` or ``draft_model``.

        Raises:
            SessionError: the file is damaged, cut short, of a newer format, or of another model, cache or setting;
                the message names it.
            OSError: it cannot be read.
            ValueError, TypeError: as the class raises for settings.
        """
        saved = read_session(path)
        base = config or (SpeculativeConfig() if cls._speculates else GenerateConfig())
        fields = {name: value for name, value in options.items() if name not in ARGUMENTS}
        settings = base.updated(**fields) if fields else base
        more: dict[str, Any] = {x: value for x, value in options.items() if x in ARGUMENTS}
        made = cls(model, config=filled(settings, saved), **more)
        made._take(saved)
        return made

    def resume(self, path: str | Path | SavedSession) -> dict[str, Any]:
        """Goes on from a file in place of the conversation so far; the notes it was saved with.

        Args:
            path: the file, or what `read_session` found in it.

        Raises:
            SessionError, OSError: as `load`; nothing has changed then.
        """
        saved = path if isinstance(path, SavedSession) else read_session(path)
        self._take(saved)
        return saved.about.notes

    # -- inside ---------------------------------------------------------------------------

    def _saved_draft(self, tensors: dict[str, Tensor]) -> SavedPart | None:
        """What a draft model holds, with its tensors added; None where there is nothing."""
        generator = self._draft_generator
        if generator is None or generator.cache is None:
            return None
        return part_of(generator, "draft", cast(ModelDraft, self._draft).rng, tensors)

    def _check_draft(self, saved: SavedSession) -> list[str]:
        """What of the draft in a file does not fit."""
        part, generator = saved.about.draft, self._draft_generator
        if part is None or generator is None:
            return []
        found = part_problems(generator, part, saved.tensors, "draft")
        if part.random is not None and self.config.seed in (None, saved.about.seed):
            found += random_problem(generator, part, saved.tensors.get("draft.random"))
        return found

    def _opened_draft(self, saved: SavedSession) -> Callable[[], None]:
        """What puts the draft of a file in place of this one's; without one it begins anew."""
        part, generator = saved.about.draft, self._draft_generator
        if generator is None:
            return self._draft.reset if self._draft is not None else lambda: None
        draft = cast(ModelDraft, self._draft)
        if part is None:

            def begin() -> None:
                draft.reset()
                draft.rng = generator._seeded(generator.config)

            return begin
        cache, rows = opened(generator, part, "draft", saved.tensors)
        rng = draft.rng
        if part.random is not None and self.config.seed in (None, saved.about.seed):
            rng = random_of(generator, part, saved.tensors["draft.random"])

        def take() -> None:
            draft.session.go_back(cache, rows)
            draft.rng = rng

        return take

    def _take(self, saved: SavedSession) -> None:
        about, problems = saved.about, _problems(self, saved)
        if problems:
            raise SessionError(f"{saved.path} does not fit: {'; '.join(problems)[:2000]}")
        cache, rows = opened(self, about.target, "target", saved.tensors)
        take_draft, rng = self._opened_draft(saved), self._rng
        if about.target.random is not None and self.config.seed in (None, about.seed):
            rng = random_of(self, about.target, saved.tensors["target.random"])
        # Whatever could fail has been done.
        take_draft()
        self._run_state = None
        self._session.go_back(cache, rows)
        self._expanded, self._rng = about.expanded, rng
        self._adapters = AdaptersInUse(self.model)


#: What is no setting among the options of `SavableGenerator.load`.
ARGUMENTS = ("device", "tokenizer", "calibration_ids", "draft_model")


def filled(config: GenerateConfig, saved: SavedSession) -> GenerateConfig:
    """The settings, with those of the file where they leave it open.

    Raises:
        SessionError: the file names settings that there are not.
    """
    kept = {**saved.about.settings, "seed": saved.about.seed}
    open_ = {name: kept[name] for name in (*KEPT, "seed") if name in kept}
    # Room is made for the tokens that are there, never on the word of a number.
    tokens = saved.tensors.get("target.tokens")
    default = GenerateConfig.model_fields["max_seq_len"].default
    open_["max_seq_len"] = max(default, 2 * (0 if tokens is None else tokens.numel()))
    if config.model_fields_set & {"cache", *(f"cache_{n}" for n in config.stream_fields)}:
        open_ = {n: x for n, x in open_.items() if not n.startswith("cache")}
    if "decode_plan" in config.model_fields_set:
        open_ = {n: x for n, x in open_.items() if not n.startswith("decode_")}
    try:
        return config.updated(
            **{n: x for n, x in open_.items() if n not in config.model_fields_set}
        )
    except ValidationError as error:
        raise SessionError(
            f"{saved.path} does not go with these settings: {explain(error)[:1000]}"
        ) from None


def _problems(generator: SavableGenerator, saved: SavedSession) -> list[str]:
    """Why a generator cannot go on from a file, by name; nothing has changed."""
    about, config = saved.about, generator.config
    kind = about.settings.get("cache")
    if config.cache == AUTO:
        return [f"cache is 'auto', and the session is stored as {shown(kind)}; give that kind"]
    found = part_problems(generator, about.target, saved.tensors, "target", kind)
    mine = config.model_dump(mode="json", include={*FIXED, "prefill"})
    found += [
        f"{name} is {shown(mine[name])}, the session has {shown(about.settings.get(name))}"
        for name in sorted(mine)
        if about.settings.get(name) != mine[name]
    ]
    longest = max(about.target.counts)
    if longest > config.max_seq_len:
        found.append(
            f"max_seq_len is {config.max_seq_len}, and the session has a row of {longest} tokens"
        )
    if about.target.random is not None and config.seed in (None, about.seed):
        found += random_problem(generator, about.target, saved.tensors.get("target.random"))
    return found or generator._check_draft(saved)
