"""Builds the one extension, gemini_strategy._C: C11 from csrc/, and CUDA kernels if nvcc is found.

Neither torch nor a GPU is needed to build.  Environment:

    GEMINI_CUDA        auto (default: kernels if nvcc is found) | 0 (CPU only) | 1 (nvcc required)
    GEMINI_CUDA_ARCHS  "90" or "80,90": only these targets, for a quick build (default: all of ours)
    GEMINI_DEBUG       1: -O1 -g, the core's own assertions, the proof of plans in tests/c/proof
    GEMINI_SANITIZE    address,undefined | thread: instrumented (preload the sanitizer's runtime)
    GEMINI_WERROR      1: a compiler warning ends the build
    CC, CUDA_HOME      the C compiler, the CUDA toolkit

Objects are kept in build/objects under the hash of everything that goes into them (source, headers,
flags, compiler): an object that exists is right, and nothing is compiled twice.
"""

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
CSRC = ROOT / "csrc"
PROOF = ROOT / "tests" / "c" / "proof"  # called by assertions alone
OBJECTS = ROOT / "build" / "objects"

WARNINGS = ["-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Wstrict-prototypes"]
# The arithmetic is one written sequence of IEEE operations: no contraction, no fast math.
ARITHMETIC = ["-ffp-contract=off", "-fno-math-errno"]
CFLAGS = ["-std=c11", "-fPIC", "-fvisibility=hidden", "-pthread", *ARITHMETIC, *WARNINGS]
# By the end of a file's name.  On other processors these files compile to nothing.
ISA_FLAGS = {
    "_avx2": ["-mavx2", "-mfma"],
    "_avx512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma"],
}
NVCC_FLAGS = ["-O3", "-std=c++17", "-fmad=false", "-ftz=false", "-prec-div=true", "-prec-sqrt=true"]
CUDA_ARCHS = ["80", "86", "89", "90", "100", "120"]


def choice(name: str, *allowed: str) -> str:
    """The environment variable's value, one of `allowed`; the first of them if it is not set."""
    value = os.environ.get(name) or allowed[0]
    if value not in allowed:
        raise SystemExit(
            f"{name} is {value!r}: set it to one of {', '.join(filter(None, allowed))}"
        )
    return value


def run(*command: str | Path) -> str:
    """Runs a compiler and returns what it printed; its failure ends the build."""
    words = [str(word) for word in command]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=ROOT)
    except FileNotFoundError:
        hint = "install a C compiler (Debian, Ubuntu: apt install gcc)"
        raise SystemExit(f"{words[0]} not found: {hint}") from None
    if done.stderr.strip():
        print(done.stderr.rstrip(), file=sys.stderr)
    if done.returncode:
        raise SystemExit(f"failed with status {done.returncode}: {shlex.join(words)}")
    return done.stdout


def digest(*parts: object) -> str:
    return hashlib.sha256("\0".join(map(repr, parts)).encode()).hexdigest()[:16]


def contents(*suffixes: str) -> str:
    """One hash of all files below csrc with these suffixes."""
    files = sorted(path for path in CSRC.rglob("*") if path.suffix in suffixes)
    return digest(*((str(path.relative_to(CSRC)), path.read_bytes()) for path in files))


def made(path: Path, make: Callable[[Path], object]) -> Path:
    """`path`, made by make(temporary path) unless it exists; at every moment complete or absent."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{os.getpid()}.{path.name}")
        try:
            make(temporary)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    return path


@dataclass(frozen=True)
class Cuda:
    """A CUDA toolkit: its compiler, and the folder that has cuda.h."""

    nvcc: Path
    include: Path

    @staticmethod
    def find() -> "Cuda | None":
        """The toolkit to build with; None, said in one line, for a CPU-only build."""
        wish = choice("GEMINI_CUDA", "auto", "0", "1")
        if wish == "0":
            print("gemini: CPU only (GEMINI_CUDA=0)")
            return None
        found = [os.environ.get("CUDA_HOME"), shutil.which("nvcc"), "/usr/local/cuda"]
        homes = [Path(place) for place in found if place]
        homes = [home.resolve().parents[1] if home.name == "nvcc" else home for home in homes]
        # A wrapper elsewhere may stand in for nvcc, so the two are looked for on their own.
        nvccs = [home / "bin" / "nvcc" for home in homes if (home / "bin" / "nvcc").is_file()]
        includes = [home / "include" for home in homes if (home / "include" / "cuda.h").is_file()]
        if nvccs and includes:
            print(f"gemini: CUDA kernels with {nvccs[0]}")
            return Cuda(nvccs[0], includes[0])
        if wish == "1":
            raise SystemExit("GEMINI_CUDA=1, but no nvcc with cuda.h was found: set CUDA_HOME")
        print("gemini: CPU only (no nvcc with cuda.h found; CUDA_HOME can name the toolkit)")
        return None

    def archs(self) -> list[str]:
        known = run(self.nvcc, "--list-gpu-arch").replace("compute_", "").split()
        wished = os.environ.get("GEMINI_CUDA_ARCHS")
        archs = wished.split(",") if wished else [arch for arch in CUDA_ARCHS if arch in known]
        if not archs or not set(archs) <= set(known):
            raise SystemExit(f"GEMINI_CUDA_ARCHS: {archs} wanted, {self.nvcc} knows {known}")
        return archs

    def fatbin_source(self) -> Path:
        """A C file with all kernels as bytes: one module, for our architectures and (PTX) later."""
        archs = self.archs()
        targets = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
        targets.append(f"-gencode=arch=compute_{archs[-1]},code=compute_{archs[-1]}")
        command = [self.nvcc, "-fatbin", "--threads=0", "-Icsrc", *NVCC_FLAGS, *targets]
        if choice("GEMINI_WERROR", "0", "1") == "1":
            command.append("-Werror=all-warnings")
        key = digest(command, run(self.nvcc, "--version"), contents(".cu", ".cuh", ".h"))

        def compile_kernels(fatbin: Path) -> None:
            unit = fatbin.with_suffix(".cu")
            kernels = [path.relative_to(CSRC) for path in sorted(CSRC.rglob("*.cu"))]
            unit.write_text("".join(f'#include "{kernel}"\n' for kernel in kernels))
            try:
                run(*command, unit, "-o", fatbin)
            finally:
                unit.unlink()

        def write_source(source: Path) -> None:
            data = made(OBJECTS / f"kernels.{key}.fatbin", compile_kernels).read_bytes()
            rows = (data[at : at + 24] for at in range(0, len(data), 24))
            lines = ["".join(f"{byte}," for byte in row) for row in rows]
            source.write_text(
                "extern const unsigned char gm_fatbin[];\n"
                "extern const unsigned long gm_fatbin_bytes;\n"
                "const unsigned char gm_fatbin[] __attribute__((aligned(64))) = {\n"
                + "\n".join(lines)
                + f"\n}};\nconst unsigned long gm_fatbin_bytes = {len(data)};\n"
            )

        return made(OBJECTS / f"fatbin.{key}.c", write_source)


class BuildCore(build_ext):
    """Compiles each file below csrc with the flags that its name asks for, and links them."""

    def build_extension(self, ext: Extension) -> None:
        compiler = shlex.split(os.environ.get("CC") or "cc")
        sanitize = choice("GEMINI_SANITIZE", "", "address,undefined", "thread")
        is_debug = choice("GEMINI_DEBUG", "0", "1") == "1"

        flags = [*CFLAGS, "-Icsrc", "-isystem", sysconfig.get_path("include")]
        flags += ["-O1", "-g", "-DGM_DEBUG"] if is_debug else ["-O3"]
        link_flags = ["-shared", "-pthread", "-Wl,-z,relro,-z,now"]
        if choice("GEMINI_WERROR", "0", "1") == "1":
            flags.append("-Werror")
        if sanitize:
            flags += [f"-fsanitize={sanitize}", "-fno-sanitize-recover=all", "-g"]
            link_flags += [f"-fsanitize={sanitize}"]
        elif not is_debug:
            link_flags += ["-Wl,-s"]

        sources = sorted(CSRC.rglob("*.c")) + sorted(PROOF.glob("*.c")) * is_debug
        cuda = Cuda.find()
        if cuda:
            flags += ["-DGM_WITH_CUDA", "-isystem", str(cuda.include)]
            sources.append(cuda.fatbin_source())

        version = run(*compiler, "--version")
        headers = contents(".h")

        def compile_one(source: Path) -> Path:
            command = [*compiler, *flags, *isa_flags(source)]
            file = source.relative_to(ROOT)
            # The name is part of the key: the text of an error has it.
            key = digest(command, version, headers, str(file), source.read_bytes())
            return made(
                OBJECTS / f"{source.parent.name}.{source.stem}.{key}.o",
                lambda target: run(*command, "-c", file, "-o", target),
            )

        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            objects = list(pool.map(compile_one, sources))
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        target.unlink(missing_ok=True)
        made(target, lambda so: run(*compiler, *link_flags, *objects, "-o", so, "-ldl", "-lm"))

    def copy_extensions_to_source(self) -> None:
        """For --inplace and editable installs; in one step, as the old file may be in use."""
        for ext in self.extensions:
            name = self.get_ext_filename(self.get_ext_fullname(ext.name))
            in_place = ROOT / name
            temporary = in_place.with_name(f"{os.getpid()}.{in_place.name}")
            shutil.copy2(Path(self.build_lib) / name, temporary)
            temporary.replace(in_place)


def isa_flags(source: Path) -> list[str]:
    if platform.machine() != "x86_64":
        return []
    return next((flags for end, flags in ISA_FLAGS.items() if source.stem.endswith(end)), [])


setup(
    ext_modules=[
        Extension(
            "gemini_strategy._C",
            sources=sorted(str(path.relative_to(ROOT)) for path in CSRC.rglob("*.c")),
            py_limited_api=True,
        )
    ],
    cmdclass={"build_ext": BuildCore},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
