"""Snippets of the inference guides, as a user would paste them, prefixed ``caramba_fast.``.

Each is run by ``test_guides.py`` or ``test_text_guide.py`` after one table of substitutions.
"""

from __future__ import annotations

import torch

from caramba_fast.infer import GenerateConfig, SpeculativeConfig
from caramba_fast.models import demo_path, load_demo

#: Part of a snippet -> its replacement here.
SUBSTITUTIONS = {
    'torch.device("mps")': "device",
    'device="mps"': "device=device",
    'device="cuda"': "device=device",
    'load_model("path/to/checkpoint")': "load_demo()",
    '"runs/cache_plans.json"': 'folder / "cache_plans.json"',
    'checkpoint_path="out/ckpt.pt"': "checkpoint_path=demo_path()",
    'tokenizer_path="Tokenizer/BPE"': "tokenizer_path=demo_path()",
    "in generate_stream(prompt)": 'in generator.generate_iter(tokenizer.encode(prompt, return_tensors="pt"))',
}
#: Names imported by earlier snippets of a guide or needed by the substitutions.
KNOWN = {
    "torch": torch, "load_demo": load_demo, "demo_path": demo_path, "GenerateConfig": GenerateConfig,
    "SpeculativeConfig": SpeculativeConfig,
}  # fmt: skip


def run(snippet, **names):
    for old, new in SUBSTITUTIONS.items():
        snippet = snippet.replace(old, new)
    space = {**KNOWN, **names}
    exec(compile(snippet, "guide", "exec"), space)
    return space


QUICK = """
from caramba_fast.infer import Generator, GenerateConfig, generate

# Quick generation
output_ids = generate(model, input_ids, max_new_tokens=64)

# Configured generation
config = GenerateConfig(
    max_new_tokens=128,
    temperature=0.8,
    top_k=50,
    cache_kind="auto",
)
generator = Generator(model, config=config)
output_ids = generator.generate(input_ids)
"""

BASIC_USAGE = """
from caramba_fast.infer import generate, GenerateConfig

# Stateless generation (simplest)
output_ids = generate(
    model,
    input_ids,           # Shape: (B, T)
    max_new_tokens=64,
    temperature=0.8,
)

# Configured generation
config = GenerateConfig(
    max_new_tokens=128,
    temperature=0.8,
    top_k=50,
    top_p=0.9,
    eos_token_id=2,
)
output_ids = generate(model, input_ids, config=config)
"""

STATEFUL_GENERATOR = """
from caramba_fast.infer import Generator, GenerateConfig

config = GenerateConfig(
    max_new_tokens=128,
    max_seq_len=4096,
    cache_kind="fp16",
)

generator = Generator(model, config=config, device=device)

# First generation
output1 = generator.generate(input_ids_1)

# Continue with context
output2 = generator.generate(input_ids_2)

# Reset cache for new conversation
generator.reset()
"""

CONFIGURING_CACHE = """
from caramba_fast.infer import GenerateConfig
from caramba_fast.config.kvcache import KVCacheKind

config = GenerateConfig(
    cache_kind=KVCacheKind.FP16,  # or "fp16"
    max_seq_len=4096,
)
"""

MANUAL_CACHE = """
from caramba_fast.cache import LayerKVCache, DecoupledLayerKVCache
from caramba_fast.config.kvcache import KVCacheTensorConfig, KVCacheKind

# Standard cache
cache = LayerKVCache(
    batch_size=1,
    max_seq_len=2048,
    k_dim=256,
    v_dim=256,
    k_cfg=KVCacheTensorConfig(kind=KVCacheKind.Q8_0),
    v_cfg=KVCacheTensorConfig(kind=KVCacheKind.FP16),
    device=torch.device("mps"),
)

# Decoupled cache for DBA
cache = DecoupledLayerKVCache(
    batch_size=1,
    max_seq_len=2048,
    k_sem_dim=128,   # Semantic keys
    k_geo_dim=256,   # Geometric keys
    v_dim=256,
    k_sem_cfg=KVCacheTensorConfig(kind=KVCacheKind.FP16),
    k_geo_cfg=KVCacheTensorConfig(kind=KVCacheKind.FP16),
    v_cfg=KVCacheTensorConfig(kind=KVCacheKind.FP16),
    device=torch.device("mps"),
)
"""

AUTO = """
config = GenerateConfig(
    cache_kind="auto",  # Let caramba choose
    cache_budget_mb=1024,  # Memory budget
)
"""

FULL_AUTO = """
config = GenerateConfig(
    cache_kind="auto",

    # Budget constraint
    cache_budget_mb=1024,

    # Quality gates
    cache_quality_max_delta_nll=0.05,   # Max NLL increase
    cache_quality_max_ppl_ratio=1.05,   # Max PPL ratio
    cache_quality_max_mean_kl=0.1,      # Needle-in-haystack gate
    cache_quality_prompt_len=64,
    cache_quality_decode_steps=4,

    # Benchmarking
    cache_auto_benchmark=True,
    cache_auto_bench_steps=8,
    cache_auto_bench_prompt_len=64,

    # Persistence
    cache_plan_path="runs/cache_plans.json",
    cache_plan_probe=True,
    cache_plan_probe_interval_sec=3600,
)
"""

PLAN_PERSISTENCE = """
config = GenerateConfig(
    cache_kind="auto",
    cache_plan_path="runs/cache_plans.json",  # Save decisions
    cache_plan_probe=True,  # Re-evaluate periodically
    cache_plan_probe_interval_sec=3600,  # Every hour
)
"""

SPECULATIVE = """
from caramba_fast.infer import SpeculativeGenerator, SpeculativeConfig

config = SpeculativeConfig(
    spec_k=4,              # Draft 4 tokens per step
    max_new_tokens=128,
    temperature=0.8,
)

generator = SpeculativeGenerator(
    target_model=large_model,
    draft_model=small_model,
    config=config,
)

output = generator.generate(input_ids)
print(f"Acceptance rate: {generator.acceptance_rate:.2%}")
"""

ADAPTIVE_SPECULATIVE = """
config = SpeculativeConfig(
    spec_k=4,
    spec_k_adaptive=True,          # Enable adaptive K
    spec_disable_below_accept=0.3, # Fall back if acceptance < 30%
    max_new_tokens=128,
)
"""

DECODE_PLANS = """
config = GenerateConfig(
    decode_plan="auto",  # auto, fixed, none
)
"""

DECODE_BUCKETS = """
config = GenerateConfig(
    decode_plan="auto",

    # Bucket thresholds
    decode_bucket_short=512,
    decode_bucket_mid=2048,

    # Fixed values (for decode_plan="fixed")
    decode_q_chunk=128,
    decode_local_window=512,
)
"""

LONG_CONTEXT = """
config = GenerateConfig(
    max_seq_len=8192,
    cache_kind="q8",        # Quantized cache
    decode_plan="auto",     # Adaptive chunking
    cache_budget_mb=2048,   # Memory limit
)
"""

COMPLETE_PIPELINE = """
import torch
from caramba_fast.infer import Generator, GenerateConfig

# Load model
model = load_model("path/to/checkpoint")
model.eval()

# Configure generation
config = GenerateConfig(
    max_new_tokens=256,
    temperature=0.7,
    top_k=50,
    top_p=0.9,
    eos_token_id=tokenizer.eos_token_id,
    max_seq_len=4096,
    cache_kind="fp16",
)

# Create generator
generator = Generator(model, config=config, device="mps")

# Generate
prompt = "Once upon a time"
input_ids = tokenizer.encode(prompt, return_tensors="pt")
output_ids = generator.generate(input_ids)
text = tokenizer.decode(output_ids[0])
print(text)
"""

BATCH = """
# Multiple prompts
prompts = [
    "The weather today is",
    "In the year 2050,",
    "The secret to happiness is",
]

input_ids = tokenizer(prompts, return_tensors="pt", padding=True)
output_ids = generator.generate(input_ids["input_ids"])

for i, text in enumerate(tokenizer.batch_decode(output_ids)):
    print(f"Prompt {i}: {text}")
"""

STREAMING = """
from caramba_fast.infer import Generator

generator = Generator(model, config=config, device="mps")

# Token-by-token generation
input_ids = tokenizer.encode("Hello", return_tensors="pt")
for token_id in generator.generate_iter(input_ids):
    print(tokenizer.decode([token_id]), end="", flush=True)
"""

MANIFEST = """
targets:
  - type: experiment
    name: generate_test
    runs:
      - id: generate
        mode: generate
        generate:
          max_new_tokens: 128
          temperature: 0.8
          cache_kind: auto
          cache_budget_mb: 1024
"""

#: From the guide to small inference modules, whose generator reads and writes text.
TEXT_GENERATION = """
from caramba_fast.inference.generate import Generator

# Load model
gen = Generator(
    checkpoint_path="out/ckpt.pt",
    tokenizer_path="Tokenizer/BPE",
    device="cuda"
)

# Generate text
output = gen.generate(
    prompt="Once upon a time",
    max_new_tokens=50,
    temperature=0.8,
    top_p=0.95
)

print(output)
"""

TEXT_STREAMING = """
for token in generate_stream(prompt):
    print(tokenizer.decode([token]), end='', flush=True)
"""

TEXT_BATCH = """
prompts = ["Hello", "How are", "The cat"]
outputs = gen.generate_batch(prompts, batch_size=3)
"""

#: Body of a loop over new tokens.
EARLY_STOPPING = """
if next_token.item() == tokenizer.eos_token_id:
    break  # Stop generation
"""

#: Recommendations: assignments whose values are settings.
ADVICE = (
    "temperature = 0.9  # Increase\ntop_p = 0.95       # Increase\n",
    "temperature = 0.7  # Decrease\n",
)
