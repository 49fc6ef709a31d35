# SPDX-License-Identifier: Apache-2.0
"""Which GPU architectures an op is compiled for: ``TORCH_CUDA_ARCH_LIST``, else the devices, else a default."""

import re
import subprocess

# By NVIDIA's names of the generations, in any case. "Tegra" and the like are parts of names that torch accepts too.
NAMED_ARCHITECTURES = {
    "maxwell": "5.0;5.2",
    "maxwell+tegra": "5.3",
    "pascal": "6.0;6.1+PTX",
    "pascal+tegra": "6.2",
    "volta": "7.0+PTX",
    "volta+tegra": "7.2",
    "turing": "7.5+PTX",
    "ampere": "8.0;8.6+PTX",
    "ampere+tegra": "8.7",
    "ada": "8.9+PTX",
    "hopper": "9.0+PTX",
    "blackwell": "10.0;10.3;12.0;12.1+PTX",
    "blackwell+tegra": "11.0",
}

# Where nothing says what is wanted: training cards of the last generations, and code that later ones translate.
DEFAULT_ARCHITECTURES = ["7.0", "7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "12.0+PTX"]

_ENTRY = re.compile(r"(\d+)\.(\d)([af]?)(\+ptx)?", re.IGNORECASE)


def parse_architectures(text: str) -> list[str]:
    """The entries of an architecture list as ``"9.0"``, ``"9.0a"`` or ``"8.6+PTX"``, each once, in the order given.

    Args:
        text: entries separated by ``;``, ``,`` or spaces; each a number with an optional ``a`` or ``f`` and an optional
            ``+PTX``, or the name of a generation, in any case.

    Raises:
        ValueError: an entry is neither.
    """
    entries: list[str] = []
    for word in re.split(r"[;,\s]+", text.strip()):
        if not word:
            continue
        if word.lower() in NAMED_ARCHITECTURES:
            entries += NAMED_ARCHITECTURES[word.lower()].split(";")
            continue
        match = _ENTRY.fullmatch(word)
        if match is None:
            names = ", ".join(name.capitalize() for name in NAMED_ARCHITECTURES)
            raise ValueError(
                f"TORCH_CUDA_ARCH_LIST: {word!r} is no architecture. Write numbers such as 9.0, 9.0a or 8.6+PTX, "
                f"separated by ';' or spaces, or one of {names}"
            )
        major, minor, variant, ptx = match.groups()
        entries.append(f"{int(major)}.{minor}{variant.lower()}{'+PTX' if ptx else ''}")
    return list(dict.fromkeys(entries))


def gencode_flags(entries: list[str]) -> list[str]:
    """``-gencode`` flags for ``nvcc``: machine code for each entry, and portable code too where it says ``+PTX``."""
    flags: list[str] = []
    for entry in entries:
        number = entry.removesuffix("+PTX").replace(".", "")
        flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if entry.endswith("+PTX"):
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return list(dict.fromkeys(flags))


def known_to(nvcc: str, entries: list[str]) -> list[str]:
    """Those of ``entries`` that this ``nvcc`` can compile for."""
    done = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True, check=True)
    known = set(re.findall(r"compute_(\w+)", done.stdout))
    return [entry for entry in entries if re.sub(r"[^0-9]", "", entry) in known]
