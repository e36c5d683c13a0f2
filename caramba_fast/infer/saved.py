"""Saved sessions: the state of a generator in one file, from which a generator continues with the same tokens.

The file holds the tokens, the used part of the cache as stored, the random state, and what these depend on: a digest
of the model, the layout of its cache, and how it is stored and read. Nothing is quantized again, and a file that does
not fit is rejected before anything changes.

The cache and random state of a draft model are saved too. Without them the draft model processes the tokens again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from caramba_fast.cache.sealed import Sealed, SealedFileError, is_sealed, read_sealed, write_sealed
from caramba_fast.config.files import explain, shown
from caramba_fast.infer.config import AUTO, GenerateConfig, SpeculativeConfig
from caramba_fast.infer.drafts import Draft, ModelDraft
from caramba_fast.infer.fields import CacheFields
from caramba_fast.infer.policy_fields import DecodePlanFields
from caramba_fast.infer.run import alone
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
from caramba_fast.writing import check_replaceable

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from caramba_fast.infer.options import LoadOptions

#: Version 2 may divide the bits of a q4_channel byte unevenly between its two channels; 1 (4 bits each) is read alike.
WHAT, VERSION = "session", 2
#: Settings that are taken from a session unless others are given.
KEPT = {*CacheFields.model_fields, *DecodePlanFields.model_fields} - {
    "compile",
    "cuda_graph",
    "max_seq_len",
}
#: The kind of a draft's cache, which the settings of a session name even where it followed from others.
DRAFT_KIND = "spec_draft_cache_kind"
#: Those that must match the session, since they decide which part of the cache is read.
FIXED = [name for name in sorted(DecodePlanFields.model_fields) if "q_chunk" not in name]


class _About(BaseModel):
    """Metadata of a session file; ``expanded``: whether num_return_sequences has multiplied the rows."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    settings: dict[str, Any]
    seed: int | None
    expanded: bool
    target: SavedPart
    draft: SavedPart | None
    notes: dict[str, Any]


class SavedSession(NamedTuple):
    """A session file that was read and verified."""

    path: Path
    about: _About
    tensors: dict[str, Tensor]


def read_session(path: str | Path) -> SavedSession:
    """Reads and verifies a session file.

    Raises:
        SessionError: (a ValueError) not a session, damaged, or of a newer format.
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
    """A `StepwiseGenerator` whose conversation can be saved to a file and resumed."""

    _draft: Draft | None = None
    _draft_generator: SavableGenerator | None = None

    @alone
    def save(
        self,
        path: str | Path,
        *,
        notes: Mapping[str, Any] | None = None,
        force: bool = False,
    ) -> None:
        """Writes the conversation to a file atomically.

        The file holds the tokens, the used part of the cache as stored, the random state if there is a ``seed``, and a
        checksum. It is not encrypted.

        Args:
            path: the file; an earlier session there is replaced.
            notes: JSON data; `resume` returns it.
            force: replace a file of any kind.

        Raises:
            RuntimeError: there is no conversation yet, or a `generate_iter` is running.
            TypeError: the model has no digest, such as one of several ranks, or notes are not JSON.
            FileExistsError: a file of another kind is there.
            OSError: it cannot be written; the old file is untouched.
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
        if self._draft_generator is not None:
            settings[DRAFT_KIND] = self._draft_generator.config.cache_name
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
        """A generator that continues a saved session, with the tokens the saved one would have generated.

        Args:
            path: a file that `save` wrote.
            model: the model it was saved with.
            config: settings. Cache settings it does not set are taken from the file, and without a ``seed`` the random
                state; those it sets must agree with the file. ``max_seq_len`` may be any that has room, by default
                2048 or twice the tokens in the file, whichever is more.
            options: fields of the config, and arguments of the class such as ``tokenizer`` or ``draft_model``.

        Raises:
            SessionError: (a ValueError) the file is damaged, truncated, of a newer format, or of another model, cache
                or setting; the message names it.
            OSError: it cannot be read.
            ValueError, TypeError: invalid settings.
        """
        saved = read_session(path)
        base = config or (SpeculativeConfig() if cls._speculates else GenerateConfig())
        fields = {name: value for name, value in options.items() if name not in ARGUMENTS}
        settings = base.updated(**fields) if fields else base
        more: dict[str, Any] = {x: value for x, value in options.items() if x in ARGUMENTS}
        made = cls(model, config=filled(settings, saved), **more)
        made._take(saved)
        return made

    @alone
    def resume(self, path: str | Path | SavedSession) -> dict[str, Any]:
        """Replaces the conversation by a saved one; returns the notes saved with it.

        Takes a file or the result of `read_session`. Raises as `load`; nothing has changed then, nor after Ctrl-C.
        """
        saved = path if isinstance(path, SavedSession) else read_session(path)
        self._take(saved)
        return saved.about.notes

    def _saved_draft(self, tensors: dict[str, Tensor]) -> SavedPart | None:
        """State of the draft model, whose tensors are added to ``tensors``; None if it has none."""
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
        """A function that installs the saved draft state, or resets the draft if the file has none."""
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
        adapters, own = AdaptersInUse(self.model), self._rng
        before, expanded = self._snapshot(), self._expanded
        try:  # nothing here can fail, but an interrupt may come
            take_draft()
            self._session.go_back(cache, rows)
            self._expanded, self._rng, self._adapters = about.expanded, rng, adapters
        except BaseException:
            self._rng = own
            self._restore(before, expanded)
            raise


#: Options of `SavableGenerator.load` that are not settings.
ARGUMENTS = ("device", "tokenizer", "calibration_ids", "draft_model")


def filled(config: GenerateConfig, saved: SavedSession) -> GenerateConfig:
    """The settings, with those left open taken from the file; raises SessionError if they are invalid together."""
    kept = {**saved.about.settings, "seed": saved.about.seed}
    open_ = {name: kept[name] for name in (*KEPT, "seed") if name in kept}
    # Sized by the tokens in the file; a stored number is not trusted.
    tokens = saved.tensors.get("target.tokens")
    default = GenerateConfig.model_fields["max_seq_len"].default
    open_["max_seq_len"] = max(default, 2 * (0 if tokens is None else tokens.numel()))
    given = config.model_fields_set & {"cache", *(f"cache_{n}" for n in config.stream_fields)}
    # A kind that names its own options would win over those given here.
    if "cache" in given or (given and ":" in str(kept.get("cache"))):
        open_ = {n: x for n, x in open_.items() if not n.startswith("cache")}
    if isinstance(config, SpeculativeConfig) and DRAFT_KIND in kept:
        open_[DRAFT_KIND] = kept[DRAFT_KIND]
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
    """Why a generator cannot continue from a file; changes nothing."""
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
