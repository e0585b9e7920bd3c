"""Makes the small machine with a real kernel: Debian's own, a stand-in for the NVIDIA driver, an initramfs.

Downloads 90 MB with apt-get, keeps 70 MB, takes half a minute; nothing of this host's own boot is touched.
By hand: ``python -m tests.rigs.kernel.install`` prints where it is.
"""

from __future__ import annotations

import hashlib
import lzma
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

from tests.rigs.cache import cache_directory, locked

HERE = Path(__file__).parent

#: What it is made from: another text of one of these makes it anew.
RECIPE = ("install.py", "nvidia.c", "init")

PROGRAMS = ("qemu-system-x86_64", "busybox", "cpio", "modprobe", "depmod", "make", "gcc", "dpkg-deb")

#: Modules that the guest may load, with those that they need.
MODULES = (
    *("vfio", "vfio_iommu_type1", "vfio-pci", "snd-hda-intel", "e1000", "e1000e"),
    *("virtio_pci", "9p", "9pnet_virtio"),
)

#: What busybox plays before the host's programs are there.
APPLETS = ("sh", "mount", "mkdir", "modprobe", "insmod", "cp", "sed", "tr", "cut", "ln", "chroot", "poweroff")


class Installation(NamedTuple):
    """A kernel that QEMU starts without firmware, and its initramfs."""

    kernel: Path
    initramfs: Path


def install() -> Installation:
    """The machine in the cache, made when it is not complete.

    Raises ``RuntimeError`` when a program is missing or a part of the making fails.
    """
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        raise RuntimeError(f"the kernel rig needs {', '.join(missing)}")
    root = cache_directory() / "kernel"
    found = Installation(root / "vmlinux", root / "initramfs.gz")
    recipe = hashlib.sha256(b"".join((HERE / name).read_bytes() for name in RECIPE)).hexdigest()
    stamp = root / "recipe"
    with locked(root.name):
        if not stamp.exists() or stamp.read_text() != recipe:
            shutil.rmtree(root, ignore_errors=True)
            root.mkdir()
            with tempfile.TemporaryDirectory(dir=root.parent, prefix="kernel-") as scratch:
                _make(found, Path(scratch))
            stamp.write_text(recipe)
    return found


def _make(wanted: Installation, scratch: Path) -> None:
    version = _version()
    _unpack(
        scratch,
        f"linux-image-{version}",
        f"linux-headers-{version}",
        f"linux-headers-{version.removesuffix('-amd64')}-common",
        f"linux-kbuild-{'.'.join(version.split('.')[:2])}",
        "linux-compiler-gcc-12-x86",
    )
    wanted.kernel.write_bytes(_uncompressed((scratch / f"boot/vmlinuz-{version}").read_bytes()))
    module = _build(scratch, version)
    _initramfs(wanted.initramfs, scratch, version, module)


def _version() -> str:
    """Of the kernel that Debian's meta package stands for, such as 6.1.0-57-amd64."""
    depends = _run(["apt-cache", "depends", "linux-image-amd64"])
    found = re.search(r"Depends: linux-image-(\S+-amd64)", depends)
    if found is None:
        raise RuntimeError("apt knows no linux-image-amd64; run apt-get update")
    return found[1]


def _unpack(scratch: Path, *packages: str) -> None:
    """Into the scratch folder, as files: nothing is installed."""
    _run(["apt-get", "download", "-q", *packages], scratch)
    for archive in sorted(scratch.glob("*.deb")):
        _run(["dpkg-deb", "-x", str(archive), str(scratch)])


def _uncompressed(image: bytes) -> bytes:
    """The ELF file inside a compressed kernel: QEMU starts it at once, without firmware and without xz."""
    at = -1
    while (at := image.find(b"\xfd7zXZ\0", at + 1)) >= 0:
        try:
            kernel = lzma.LZMADecompressor().decompress(image[at:])
        except lzma.LZMAError:
            continue
        if kernel.startswith(b"\x7fELF"):
            return kernel
    raise RuntimeError("there is no xz-compressed kernel in vmlinuz")


def _build(scratch: Path, version: str) -> Path:
    headers = scratch / f"usr/src/linux-headers-{version}"
    makefile = headers / "Makefile"
    makefile.write_text(makefile.read_text().replace("/usr/src/", f"{scratch}/usr/src/"))
    source = scratch / "driver"
    source.mkdir()
    shutil.copy(HERE / "nvidia.c", source)
    (source / "Makefile").write_text("obj-m := nvidia.o\n")
    _run(["make", "-s", "-C", str(headers), f"M={source}", "CC=gcc", "modules"])
    _run(["strip", "-g", str(source / "nvidia.ko")])
    return source / "nvidia.ko"


def _initramfs(path: Path, scratch: Path, version: str, module: Path) -> None:
    tree = scratch / "initramfs"
    for folder in ("bin", "dev", "proc", "sys", "sbin", f"lib/modules/{version}/extra"):
        (tree / folder).mkdir(parents=True)
    shutil.copy(str(shutil.which("busybox")), tree / "bin/busybox")
    for applet in APPLETS:
        (tree / "bin" / applet).symlink_to("busybox")
    (tree / "sbin/modprobe").symlink_to("/bin/busybox")
    modules = scratch / "lib/modules" / version
    _run(["depmod", "-b", str(scratch), version])
    for name in MODULES:
        for line in _run(
            ["modprobe", "-d", str(scratch), "-S", version, "--show-depends", name]
        ).splitlines():
            if line.startswith("insmod "):
                file = Path(line.split()[1])
                target = tree / "lib/modules" / version / file.relative_to(modules)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, target)
    for name in ("modules.builtin", "modules.order", "modules.builtin.modinfo"):
        shutil.copy(modules / name, tree / "lib/modules" / version)
    shutil.copy(module, tree / "lib/modules" / version / "extra")
    _run(["depmod", "-b", str(tree), version])
    shutil.copy(HERE / "init", tree / "init")
    (tree / "init").chmod(0o755)
    names = "\n".join(str(file.relative_to(tree)) for file in sorted(tree.rglob("*")))
    archive = subprocess.run(
        ["cpio", "-o", "-H", "newc", "--quiet"],
        input=names.encode(),
        cwd=tree,
        capture_output=True,
        check=True,
    )
    path.write_bytes(
        subprocess.run(["gzip", "-1"], input=archive.stdout, capture_output=True, check=True).stdout
    )


def _run(command: list[str], folder: Path | None = None) -> str:
    done = subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {(done.stderr or done.stdout)[-2000:]}")
    return done.stdout


if __name__ == "__main__":
    print(*install(), sep="\n")
