#!/usr/bin/env python3
"""Fetch the packages that are measured beside ours, exactly pinned, and unpack what is needed into .peers/.

    python benchmarks/fetch_peers.py [--with quack] [--into FOLDER] [--pack FOLDER]

Published wheels for Python 3.12 on Linux x86_64 (flash-attn: its source distribution), without their
dependencies, through pip. Nothing is installed and no code of theirs is run, except that pip reads the
metadata of flash-attn's source distribution, which needs torch. quack needs nvidia-cutlass-dsl (a 92 MB
wheel, 240 MB unpacked), so it is fetched only when asked for.

--pack writes a .tar.xz of each package, to carry them to a machine without a network: unpack them there into
one folder and name it in MCE_PEERS. quack's takes some 60 MB and a quarter of an hour, the others 2 MB.

Exit status: 0 everything is there, 1 a package could not be fetched (it is named), 2 bad arguments.
"""

from __future__ import annotations

import argparse
import dataclasses
import lzma
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux2014_x86_64", "any")


@dataclasses.dataclass(frozen=True)
class Package:
    """A published package and the parts of it that are unpacked into FOLDER/{folder}.

    `wanted` are beginnings of paths inside the package; a path that ends with one of `unwanted` is left out.
    """

    requirement: str
    folder: str
    wanted: tuple[str, ...]
    unwanted: tuple[str, ...] = (".so", ".pyi")
    source: bool = False


def _transformer_engine(version: str) -> Package:
    files = ("common/triton/cross_entropy.py", "pytorch/triton/cross_entropy.py", "pytorch/cross_entropy.py")
    return Package(
        f"transformer-engine=={version}",
        f"transformer_engine-{version}",
        tuple(f"transformer_engine/{name}" for name in files),
    )


PACKAGES = (
    _transformer_engine("2.17.0"),
    _transformer_engine("2.20.2"),
    Package("megatron-core==0.18.0", "megatron_core-0.18.0", ("megatron/core/",)),
    Package("liger-kernel==0.8.5", "liger_kernel-0.8.5", ("liger_kernel/",)),
    Package(
        "flash-attn==2.8.3",
        "flash_attn-2.8.3",
        ("flash_attn-2.8.3/flash_attn/ops/triton/cross_entropy.py",),
        source=True,
    ),
    Package(
        "unsloth==2026.10.9",
        "unsloth-2026.10.9",
        ("unsloth/kernels/cross_entropy_loss.py", "unsloth/kernels/utils.py"),
    ),
    Package("torchtitan==0.3.0", "torchtitan-0.3.0", ("torchtitan/components/loss.py",)),
    Package("cut-cross-entropy==25.1.1", "cut_cross_entropy-25.1.1", ("cut_cross_entropy/",)),
)

_QUACK = "quack_kernels-0.6.5"
# Only what a Hopper GPU needs of the DSL: its compiler and runtime; no stubs of other machines, no profiler.
_DSL_UNWANTED = (
    ".a",
    "-gnu/libcute_dsl_runtime.so",
    "-qnx8.0.0/libcute_dsl_runtime.so",
    "libiket_injection.so",
)
QUACK_PACKAGES = (
    Package("quack-kernels==0.6.5", _QUACK, ("quack/",)),
    Package("nvidia-cutlass-dsl-libs-base==4.8.1", _QUACK, ("nvidia_cutlass_dsl/",), _DSL_UNWANTED),
    Package("nvidia-cutlass-dsl-libs-core==4.8.1", _QUACK, ("nvidia_cutlass_dsl/",), _DSL_UNWANTED),
    Package("nvidia-cutlass-dsl-libs-cu13==4.8.1", _QUACK, ("nvidia_cutlass_dsl/",), _DSL_UNWANTED),
    Package("apache-tvm-ffi==0.1.15.post2", _QUACK, ("tvm_ffi/",), (".a", ".h")),
    Package("torch-c-dlpack-ext==0.1.5", _QUACK, ("torch_c_dlpack_ext/",), ()),
)


def download(package: Package, into: Path) -> Path:
    """The package's file, fetched with pip.

    Raises:
        RuntimeError: pip failed; with the end of what it said.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
    if package.source:
        command += ["--no-binary", ":all:", "--no-build-isolation"]
    else:
        command += ["--only-binary", ":all:", "--python-version", "3.12", "--implementation", "cp"]
        command += [f"--platform={name}" for name in PLATFORMS]
    into.mkdir(parents=True)
    done = subprocess.run(
        [*command, "--dest", str(into), package.requirement], capture_output=True, text=True
    )
    files = list(into.iterdir())
    if done.returncode != 0 or len(files) != 1:
        raise RuntimeError("\n".join((done.stderr or done.stdout).strip().splitlines()[-3:]))
    return files[0]


def unpack(package: Package, archive: Path, into: Path) -> int:
    """Writes the wanted files below `into`; returns how many.

    Raises:
        RuntimeError: a wanted part is not in the package.
    """
    missing = set(package.wanted)
    count = 0
    for name, content in _members(package, archive):
        part = next((w for w in package.wanted if name.startswith(w)), None)
        if part is None or name.endswith(package.unwanted):
            continue
        missing.discard(part)
        # a source distribution has a folder of its name around everything
        target = into / (name.split("/", 1)[1] if package.source else name)
        if into.resolve() not in target.resolve().parents:
            raise RuntimeError(f"{archive.name} holds a path outside its folder: {name}")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
        count += 1
    if missing:
        raise RuntimeError(f"{archive.name} does not hold {', '.join(sorted(missing))}")
    return count


def _members(package: Package, archive: Path) -> Iterable[tuple[str, bytes]]:
    def wanted(name: str) -> bool:
        return name.startswith(package.wanted) and not name.endswith((*package.unwanted, "/"))

    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for name in wheel.namelist():
                if wanted(name):
                    yield name, wheel.read(name)
        return
    with tarfile.open(archive) as tar:
        for member in tar:
            if member.isfile() and wanted(member.name):
                file = tar.extractfile(member)
                assert file is not None
                yield member.name, file.read()


def size_mib(folder: Path) -> float:
    return sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) / 2**20


def fetch(packages: Iterable[Package], into: Path) -> list[str]:
    """Fetches the packages that are not there yet; returns a line for each that failed."""
    failed = []
    by_folder: dict[str, list[Package]] = {}
    for package in packages:
        by_folder.setdefault(package.folder, []).append(package)
    for folder, members in by_folder.items():
        target = into / folder
        if target.is_dir():
            print(f"{folder}: already there, {size_mib(target):.1f} MiB")
            continue
        with tempfile.TemporaryDirectory(dir=into, prefix=".partial-") as temporary:
            partial = Path(temporary) / folder
            partial.mkdir()
            try:
                for number, package in enumerate(members):
                    archive = download(package, Path(temporary) / f"download-{number}")
                    unpack(package, archive, partial)
            except RuntimeError as error:
                failed.append(f"{', '.join(p.requirement for p in members)}: {error}")
                continue
            shutil.move(partial, target)
        print(f"{folder}: {size_mib(target):.1f} MiB")
    return failed


def pack(folder: Path, into: Path) -> Path:
    """A .tar.xz of an unpacked package, its libraries without symbols; one that is there is kept."""
    into.mkdir(parents=True, exist_ok=True)
    target = into / f"{folder.name}.tar.xz"
    if target.exists():
        return target
    libraries = sorted(folder.rglob("*.so"))
    if libraries and shutil.which("strip"):
        subprocess.run(["strip", "--strip-unneeded", *map(str, libraries)], check=False)
    # the filter for x86 machine code saves a seventh of the libraries
    machine_code = {"id": lzma.FILTER_X86}
    dictionary = {"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": 2**28}
    partial = target.with_suffix(".partial")
    with (
        lzma.open(partial, "wb", filters=[machine_code, dictionary]) as compressed,
        tarfile.open(fileobj=compressed, mode="w|") as tar,
    ):
        tar.add(folder, folder.name, filter=lambda m: None if "__pycache__" in m.name else m)
    partial.replace(target)
    return target


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--with", dest="extra", choices=("quack",), help="fetch quack and its compiler too")
    repository = Path(__file__).resolve().parents[1]
    parser.add_argument("--into", type=Path, default=repository / ".peers", help="default: .peers")
    parser.add_argument("--pack", type=Path, metavar="FOLDER", help="write a .tar.xz of each package there")
    options = parser.parse_args(arguments)
    options.into.mkdir(parents=True, exist_ok=True)
    wanted = PACKAGES + (QUACK_PACKAGES if options.extra else ())
    failed = fetch(wanted, options.into)
    print(f"together {size_mib(options.into):.1f} MiB in {options.into}")
    if options.pack:
        for name in dict.fromkeys(p.folder for p in wanted):
            if (options.into / name).is_dir():
                packed = pack(options.into / name, options.pack)
                print(f"{packed}: {packed.stat().st_size / 2**20:.1f} MiB", flush=True)
    for line in failed:
        print(f"could not fetch {line}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
