"""The CUDA toolkit that SGLang compiles kernels with: the machine's own, else one made of links to installed wheels.

SGLang 0.5.23 compiles some kernels when they are first called. It looks for nvcc in CUDA_HOME, CUDA_PATH, on the PATH
and in /usr/local/cuda, and links with `-L$CUDA_HOME/lib64 -lcudart`. The wheels of requirements/gpu.txt hold all of it
in `nvidia/cu13`, but with `lib` for `lib64` and without the names that a linker looks for (libcudart.so). So
`python -m proxy.engine.toolkit`, which `make install-gpu` runs, lays out a toolkit of links in the environment.
"""

import shutil
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

WHEELS = "cu13"
"""The folder of the namespace package `nvidia` that CUDA 13's wheels share."""
LINKED = Path(sys.prefix) / "cuda"
"""Where the links are."""
SYSTEM = Path("/usr/local/cuda")
DRIVER = "libcuda.so"


def cuda_home(environment: Mapping[str, str], linked: Path = LINKED) -> Path | None:
    """The toolkit that SGLang should use, or None where there is none."""
    if named := environment.get("CUDA_HOME") or environment.get("CUDA_PATH"):
        return Path(named)
    if nvcc := shutil.which("nvcc", path=environment.get("PATH")):
        return Path(nvcc).parent.parent
    return next((home for home in (SYSTEM, linked) if (home / "bin" / "nvcc").exists()), None)


def link_toolkit(wheels: Path, linked: Path) -> None:
    """Lay out a toolkit of links to the wheels' files, in place of an earlier one."""
    shutil.rmtree(linked, ignore_errors=True)
    libraries, stubs = linked / "lib64", linked / "lib64" / "stubs"
    stubs.mkdir(parents=True)
    for folder in ("bin", "include", "nvvm"):
        (linked / folder).symlink_to(wheels / folder)
    for library in sorted((wheels / "lib").iterdir()):
        (libraries / library.name).symlink_to(library)
        plain = libraries / f"{library.name.split('.so')[0]}.so"
        if ".so." in library.name and not plain.exists():
            plain.symlink_to(library)
    if driver := _driver():
        (stubs / DRIVER).symlink_to(driver)


def installed_wheels() -> Path | None:
    """The folder of the wheels of CUDA 13, if they bring a compiler."""
    spec = find_spec("nvidia")
    folders = spec.submodule_search_locations if spec else None
    homes = (Path(folder, WHEELS) for folder in folders or ())
    return next((home for home in homes if (home / "bin" / "nvcc").exists()), None)


def _driver() -> Path | None:
    """The driver's library, which stands in for the toolkit's stub of it. Absent while an image is built."""
    places = ("/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/local/nvidia/lib64", "/usr/lib/wsl/lib")
    return next((path for place in places if (path := Path(place, f"{DRIVER}.1")).exists()), None)


def main() -> int:
    """Link the wheels of this environment."""
    wheels = installed_wheels()
    if wheels is None:
        print(
            "error: no CUDA wheels with nvcc in this environment; install them with: make install-gpu", file=sys.stderr
        )
        return 2
    link_toolkit(wheels, LINKED)
    print(f"CUDA toolkit of links to {wheels}: {LINKED}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
