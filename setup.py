"""Builds the C++ extension and places kernels/ and bench/ inside the package; see pyproject.toml.

The extension is a plain shared library that registers its ops with torch when it is loaded
(`caramba_fast.ops.registry`). It has no Python symbols and uses libtorch's stable ABI only, so one
file serves every Python and every torch from 2.10 on. ``CARAMBA_FAST_BUILD_CPP=0`` leaves it out,
``CARAMBA_FAST_SANITIZE=1`` builds it with gcc's address and undefined-behaviour checks. ``CARAMBA_FAST_DEMO=0`` leaves
the demo models out, which `demo/` has as a distribution of their own. ``CARAMBA_FAST_REPOSITORY`` is the address
of the repository, where it has one: releases link to it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from setuptools import __version__ as setuptools_version
from setuptools import find_packages, setup

BUILD_CPP = os.environ.get("CARAMBA_FAST_BUILD_CPP", "1") != "0"
SANITIZE = os.environ.get("CARAMBA_FAST_SANITIZE", "0") != "0"
# Some Pythons build with -fwrapv, under which no overflow would be reported.
CHECKS = ["-O1", "-g1", "-fno-wrapv", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all"]
CHECKED = ["-fsanitize=address,undefined", *CHECKS] if SANITIZE else []
DEMO = os.environ.get("CARAMBA_FAST_DEMO", "1") != "0"
REPOSITORY = os.environ.get("CARAMBA_FAST_REPOSITORY", "").rstrip("/")
BENCH = ("generation", "kernels", "pages", "peers", "real", "serving")
DEMO_FILES = ("safetensors", "json", "txt", "md", "csv")


def check_setuptools() -> None:
    """Ends with a message if setuptools is too old for pyproject.toml, which pip checks in builds of its own alone."""
    text = Path("pyproject.toml").read_text(encoding="utf-8")
    needed = re.findall(r'^requires = .*"setuptools>=(\d+)', text, re.MULTILINE)[0]
    if int(setuptools_version.split(".")[0]) < int(needed):
        raise SystemExit(
            f"setuptools is {setuptools_version} and pyproject.toml needs {needed} or newer: "
            f"pip install 'setuptools>={needed}'"
        )


def unsupported() -> list[tuple[str, str | None]]:
    """Macros that leave out the instruction sets this machine lacks: checked code is only run where it is built."""
    cpuinfo = Path("/proc/cpuinfo")
    known = cpuinfo.read_text().split() if cpuinfo.exists() else []
    flags = {"CARAMBA_FAST_AVX512": "avx512f", "CARAMBA_FAST_AVX_VNNI": "avx_vnni"}
    return [(macro, "0") for macro, flag in flags.items() if flag not in known]


def extension() -> dict[str, Any]:
    """The arguments of setup() that build ``caramba_fast/_C.abi3.so``."""
    from torch.utils.cpp_extension import BuildExtension, CppExtension  # noqa: PLC0415

    module = CppExtension(
        "caramba_fast._C",
        sources=sorted(map(str, Path("csrc").glob("*.cpp"))),
        depends=sorted(map(str, Path("csrc").glob("*.h"))),
        define_macros=[
            ("TORCH_TARGET_VERSION", "0x020a000000000000"),
            *(unsupported() if SANITIZE else ()),
        ],
        extra_compile_args=[
            "-std=c++17",
            "-O3",
            "-falign-functions=64",  # else a loop's speed changes with the code before it
            "-g0",
            "-fvisibility=hidden",
            "-ffp-contract=off",  # a fused multiply-add would change codes between backends
            *CHECKED,
        ],
        extra_link_args=CHECKED,
        py_limited_api=True,
    )
    return {
        "ext_modules": [module],
        "cmdclass": {"build_ext": BuildExtension},
        "options": {"bdist_wheel": {"py_limited_api": "cp310"}},
    }


def urls() -> dict[str, str]:
    """What a package index links to."""
    if not REPOSITORY:
        return {}
    return {
        "Source": REPOSITORY,
        "Documentation": f"{REPOSITORY}/tree/main/docs",
        "Changelog": f"{REPOSITORY}/blob/main/CHANGELOG.md",
        "Issues": f"{REPOSITORY}/issues",
    }


def readme() -> str:
    """The README; where the repository has an address, its relative links lead there."""
    text = Path("README.md").read_text(encoding="utf-8")
    if not REPOSITORY:
        return text
    text = re.sub(r"!\[([^]]*)\]\((?!https?:|#)", rf"![\1]({REPOSITORY}/raw/main/", text)
    return re.sub(r"(?<!!)\[([^]]*)\]\((?!https?:|#)", rf"[\1]({REPOSITORY}/blob/main/", text)


check_setuptools()
setup(
    packages=[
        *find_packages(include=["caramba_fast", "caramba_fast.*"]),
        "caramba_fast.kernels",
        "caramba_fast.bench",
        *(f"caramba_fast.bench.{part}" for part in BENCH),
    ],
    # kernels/ must stay without an __init__.py: with the repository root on sys.path it would
    # shadow Hugging Face's `kernels` package.
    package_dir={
        "caramba_fast.kernels": "kernels/triton",
        "caramba_fast.bench": "bench",
        **{f"caramba_fast.bench.{part}": f"bench/{part}" for part in BENCH},
    },
    package_data={
        "caramba_fast": ["py.typed"],
        "caramba_fast.models": [f"demo/**/*.{suffix}" for suffix in DEMO_FILES if DEMO],
    },
    long_description=readme(),
    long_description_content_type="text/markdown",
    project_urls=urls(),
    **(extension() if BUILD_CPP else {}),
)
