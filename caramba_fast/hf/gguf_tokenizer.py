"""Tokenizers of GGUF files, as transformers loads them, corrected where llama.cpp behaves differently."""

from __future__ import annotations

import importlib.util
import json
from importlib import metadata
from pathlib import Path
from typing import Any

from caramba_fast.config.files import shown
from caramba_fast.models.config import CheckpointError
from caramba_fast.models.gguf import GgufFile

#: Pre-tokenizers that ignore merges for whole words in the vocabulary, and add BOS unless the file says otherwise.
_OF_LLAMA_3 = (
    "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "tekken", "midm-2.0", "lfm2", "jina-v5-nano",
)  # fmt: skip
#: Byte-level pre-tokenizers that split as GPT-2's does, but make each digit a word.
_DIGITS_ALONE = ("smollm", "starcoder", "refact", "codeshell", "command-r")
#: Token types that are matched before text is split into words.
_CONTROL, _USER_DEFINED = 3, 4


def gguf_tokenizer(path: Path) -> Any:
    """The tokenizer in a GGUF file.

    Raises CheckpointError if there is none, or its pre-tokenizer (``tokenizer.ggml.pre``) is unknown.
    """
    from transformers import AutoTokenizer  # noqa: PLC0415 - it is slow to import

    file = GgufFile(path)
    kind, cut, begins = file.tokenizer
    splits = "transformers.integrations.gguf"
    if kind == "gpt2" and cut != "gpt-2" and not importlib.util.find_spec(splits):
        raise CheckpointError(
            f"{path.name} has a byte-level tokenizer that cuts words as {shown(cut)} does, which transformers "
            f"{metadata.version('transformers')} does not read; a newer one does (pip install -U transformers)"
        )
    try:
        found: Any = AutoTokenizer.from_pretrained(
            str(path.parent), gguf_file=path.name, local_files_only=True, trust_remote_code=False
        )
        if kind == "llama" and file.architecture != "gemma3":
            _space_in_front(found, file.prefixes_space)
        if kind == "gpt2":
            _keep_special_tokens(found, file)
        if kind != "gpt2" or cut == "gpt-2":
            return found
        from tokenizers import pre_tokenizers  # noqa: PLC0415
        from transformers.integrations.gguf.gguf_tokenizer_mapping import (  # noqa: PLC0415
            GGUF_PRE_TOKENIZER_SPLITS,
        )
    except Exception as error:  # transformers and tokenizers raise nearly every type there is
        raise CheckpointError(
            f"{path} holds no tokenizer transformers can load: {error}"
        ) from error
    if cut in _DIGITS_ALONE:
        found.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    elif cut not in GGUF_PRE_TOKENIZER_SPLITS:
        known = sorted({"gpt-2", *_DIGITS_ALONE, *GGUF_PRE_TOKENIZER_SPLITS})
        raise CheckpointError(
            f"{path.name}: tokenizer.ggml.pre is {cut!r}, which says how text is cut into words; known are "
            f"{', '.join(known)}"
        )
    if cut in _OF_LLAMA_3:  # as llama.cpp reads such files
        found.backend_tokenizer.model.ignore_merges = True
        if begins is None:
            found.add_bos_token = True
    return found


def _space_in_front(found: Any, wanted: bool) -> None:
    """Makes a SentencePiece tokenizer treat spaces as llama.cpp does.

    If ``wanted``, each piece of text between special tokens gets one more leading space, even if it begins with one.
    Otherwise none is added, and decoding strips none.
    """
    from tokenizers import decoders, normalizers  # noqa: PLC0415

    backend = found.backend_tokenizer
    spaces = [normalizers.Replace(" ", "\u2581")]
    backend.pre_tokenizer = None
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581")] * wanted + spaces)
    if not wanted:
        backend.decoder = decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
        )


def _keep_special_tokens(found: Any, file: GgufFile) -> None:
    """Keeps special tokens of a byte-level vocabulary whole if their spelling is not in the byte alphabet.

    transformers would treat them as text, add BOS and the like again with ids beyond the vocabulary, and add GPT-2's
    end-of-text token if a file has none.
    """
    from tokenizers import AddedToken, Tokenizer  # noqa: PLC0415
    from transformers.convert_slow_tokenizer import bytes_to_unicode  # noqa: PLC0415

    tokens, spelling = file.tokens, bytes_to_unicode()
    alphabet = set(spelling.values())
    raw = {
        token: kind == _CONTROL
        for token, kind in zip(tokens, file.token_types, strict=False)
        if kind in (_CONTROL, _USER_DEFINED) and not set(token) <= alphabet
    }
    backend = found.backend_tokenizer
    if not raw and all(index < len(tokens) for index in backend.get_added_tokens_decoder()):
        return
    said = json.loads(backend.to_str())
    said["added_tokens"] = [x for x in said["added_tokens"] if x["id"] < len(tokens)]
    said["model"]["vocab"] = {
        token
        if token in raw or set(token) <= alphabet
        else "".join(spelling[byte] for byte in token.encode()): index
        for index, token in enumerate(tokens)
    }
    said["post_processor"] = None  # it may name tokens that are gone
    changed = Tokenizer.from_str(json.dumps(said))
    for token, special in raw.items():
        changed.add_tokens([AddedToken(token, special=special, normalized=False)])
    post, found._tokenizer = backend.post_processor, changed
    if type(post).__name__ == "TemplateProcessing":
        found.update_post_processor()
    elif post is not None:
        changed.post_processor = post
