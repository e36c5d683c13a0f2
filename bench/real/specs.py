"""The caches that are measured on real models."""

from __future__ import annotations

#: The cache that all others are compared with.
BASELINE = "fp16"
#: llama.cpp's recipe: 4 bits for keys and values, both rotated.
ROTATED = "q4:plain,rotate"
#: The same with 8 bits.
ROTATED_8 = "q8:plain,rotate"
#: q4 as in the serving engine: pages are shared, but the newest tokens in fp16 would belong to one request.
SHARED = "q4:residual_len=0"
#: q4 with as many of the newest tokens in fp16 as transformers' quantized caches keep.
TAILED = "q4:residual_len=128"
#: Larger groups and blocks; what they save up to 4,096 tokens goes to more of the newest tokens in fp16.
COARSE = "q4:qblock=64,residual_len=80"
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
    COARSE,
    SHARED,
    "q8/q4",
    ROTATED,
    ROTATED_8,
    "q8:plain",
    "q4:plain",
)
#: Caches in long contexts.
LONG = ("q8", "q4", TAILED)
#: Caches after odd prompts; q8:plain as a format that is known to work.
PROMPTED = ("q4", "nf4", "q8", "q8:plain", ROTATED)
#: Bits of the caches that `kivi` emulates, by name.
KIVI = {"KIVI, 2 bits": 2, "KIVI, 4 bits": 4}
#: Caches of the tasks; the last has to fail.
TASKS = ("q8", "q4", TAILED, "nf4", *KIVI, ROTATED, "q4:plain")
