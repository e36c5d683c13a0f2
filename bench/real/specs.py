"""Which caches are measured on real models: the one place to add to."""

from __future__ import annotations

#: What everything is compared with.
BASELINE = "fp16"
#: llama.cpp's recipe: 4 bits for keys and values, both rotated.
ROTATED = "q4:plain,rotate"
#: q4 as the serving engine has it: its pages are shared, and the newest tokens in fp16 belong to one request.
SHARED = "q4:residual_len=0"
#: q4 with as many of the newest tokens in fp16 as transformers' quantized caches keep.
TAILED = "q4:residual_len=128"
#: q4 whose keys are plain nibbles.
NIBBLES = "q4:fit=amax/q4"
#: Caches of the study, in the order of the tables.
STUDY = (
    "q8",
    "q4",
    TAILED,
    "nf4",
    NIBBLES,
    "q4:qblock=64",
    SHARED,
    "q8/q4",
    ROTATED,
    "q8:plain",
    "q4:plain",
)
#: Behind long contexts.
LONG = ("q8", "q4", TAILED)
#: Caches behind odd prompts; q8_0 as it is stands for what nobody complains of.
PROMPTED = ("q4", "nf4", "q8", "q8:plain", ROTATED)
#: Bits by the name of a cache that `kivi` stands in for.
KIVI = {"KIVI, 2 bits": 2, "KIVI, 4 bits": 4}
#: Caches that answer questions, complete functions and write on; the last is one that has to fail.
TASKS = ("q8", "q4", "nf4", *KIVI, ROTATED, "q4:plain")
