"""What a manifest may say.

```yaml
targets:
  - type: experiment
    name: generate_test
    model: demo                 # or a checkpoint folder
    runs:
      - id: generate
        mode: generate
        prompts: ["def main():"]
        generate:
          max_new_tokens: 128
          cache_kind: auto
          cache_budget_mb: 1024
```

Settings of a run are those of `GenerateConfig`; under ``speculative`` instead of ``generate`` those of
`SpeculativeConfig`. Paths are relative to the manifest.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from caramba_fast.config.spec import spec_name
from caramba_fast.infer import GenerateConfig, SpeculativeConfig
from caramba_fast.infer.config import AUTO
from caramba_fast.manifest.opening import LOOKUP
from caramba_fast.policy.settings import CachePolicyFields

Name = Annotated[str, Field(min_length=1)]
#: What runs write when a manifest names no prompt.
DEFAULT_PROMPT = "import os\n\ndef main():\n"


class Part(BaseModel):
    """What every part of a manifest shares: unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False)


class Benchmark(Part):
    """How a run in mode ``benchmark`` measures.

    Attributes:
        repeats: timed generations of each cache kind; medians are reported.
        warmup: generations before them that are not counted.
        compare: cache kinds timed in turn with the run's own, in the same rounds; with all other settings the
            same, except those of ``cache_kind: auto``.
    """

    repeats: int = Field(default=5, ge=1)
    warmup: int = Field(default=1, ge=0)
    compare: tuple[str, ...] = ()

    @field_validator("compare")
    @classmethod
    def _known(cls, kinds: tuple[str, ...]) -> tuple[str, ...]:
        """Canonical names, each once."""
        return tuple(dict.fromkeys(AUTO if kind == AUTO else spec_name(kind) for kind in kinds))


class RunSpec(Part):
    """One run.

    Attributes:
        id: its name, unique in its target.
        mode: "generate" writes text; "benchmark" measures and writes the metrics as JSON.
        prompts: texts to continue, one row each; prompt_file: a text file, the whole of it one prompt.
        generate: settings.
        speculative: settings with a draft, in their place.
        draft_model: the draft of ``speculative``: "lookup", "demo:gqa", "demo:dba" or a folder.
        benchmark: how to measure.
        output: JSON file for the texts and metrics; by default none in mode generate, and TARGET-RUN.json in
            mode benchmark.
    """

    id: Name
    mode: Literal["generate", "benchmark"] = "generate"
    prompts: tuple[Name, ...] = ()
    prompt_file: Path | None = None
    generate: GenerateConfig | None = None
    speculative: SpeculativeConfig | None = None
    draft_model: str = LOOKUP
    benchmark: Benchmark | None = None
    output: Path | None = None

    @model_validator(mode="after")
    def _agrees(self) -> RunSpec:
        if self.generate is not None and self.speculative is not None:
            raise ValueError("generate and speculative are both given; give one of them")
        if self.prompts and self.prompt_file is not None:
            raise ValueError("prompts and prompt_file are both given; give one of them")
        if self.speculative is None and "draft_model" in self.model_fields_set:
            raise ValueError("draft_model is for speculative, which is not given")
        if self.mode != "benchmark" and self.benchmark is not None:
            raise ValueError(f"benchmark is for mode benchmark; mode is {self.mode}")
        self.compared()
        return self

    @property
    def config(self) -> GenerateConfig:
        """The settings, with or without a draft."""
        return self.speculative or self.generate or GenerateConfig()

    @property
    def settings_key(self) -> str:
        """The key ``config`` is under."""
        return "generate" if self.speculative is None else "speculative"

    def compared(self) -> dict[str, GenerateConfig]:
        """The settings of every cache kind that is timed, by its name; the run's own first.

        Raises:
            ValueError: settings of the run that a kind to compare with cannot have.
        """
        config = self.config
        kinds = {config.cache_name: config}
        for kind in self.benchmark.compare if self.benchmark else ():
            if kind not in kinds:
                left_out = set() if kind == AUTO else set(CachePolicyFields.model_fields)
                given = config.model_dump(exclude_unset=True, exclude=left_out)
                kinds[kind] = type(config)(**{**given, "cache_kind": kind})
        return kinds


class Target(Part):
    """A model and what is done with it.

    Attributes:
        type: "experiment".
        name: unique in the manifest.
        model: "demo", "demo:gqa", "demo:dba", or a Hugging Face checkpoint folder, relative to the manifest.
        tokenizer: a tokenizer folder or file; by default the model's own.
        device: cpu, cuda or mps.
        dtype: of the weights.
        runs: in order.
    """

    type: Literal["experiment"] = "experiment"
    name: Name
    model: str = "demo"
    tokenizer: Path | None = None
    device: str = "cpu"
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    runs: Annotated[tuple[RunSpec, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _ids_differ(self) -> Target:
        _check_unique("runs", [run.id for run in self.runs])
        return self


class Manifest(Part):
    """A whole manifest.

    Attributes:
        version: 1.
        name, notes: for readers.
        targets: in order.
    """

    version: Literal[1] = 1
    name: str = ""
    notes: str = ""
    targets: Annotated[tuple[Target, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _names_differ(self) -> Manifest:
        _check_unique("targets", [target.name for target in self.targets])
        return self


def _check_unique(what: str, names: list[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{what} have the name {twice[0]!r} twice; names must differ")
