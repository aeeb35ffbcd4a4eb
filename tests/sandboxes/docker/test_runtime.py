"""The runtime's Python and Node.js need nothing of the image, not even a C library."""

import json
import subprocess

import pytest

from harness.agents.bundles.runtime import PACKAGE
from sandboxes.bundles import NODE, PYTHON, RUNTIME
from sandboxes.docker.labels import labels_of, this_process
from tests.conftest import need

PYTHON_SAYS = """
import ctypes, json, socket, sqlite3, ssl, subprocess, sys
from concurrent.futures import ThreadPoolExecutor
child = subprocess.run([sys.executable, "-I", "-c", "import ssl; print(ssl.OPENSSL_VERSION)"], capture_output=True)
libraries = {line.split()[-1] for line in open("/proc/self/maps") if ".so" in line}
foreign = [path for path in libraries if not path.startswith(sys.prefix)]
print(json.dumps([sys.executable, child.stdout.decode().split()[0], foreign, json.__cached__[-4:]]))
"""
NODE_SAYS = """
const { execFileSync } = require("child_process");
const child = execFileSync(process.execPath, ["-p", "6 * 7"]).toString().trim();
const libraries = process.report.getReport().sharedObjects.filter((path) => path.startsWith("/"));
const foreign = libraries.filter((path) => !path.startsWith("RUNTIME"));
console.log(JSON.stringify([process.execPath, child, foreign]));
""".replace("RUNTIME", RUNTIME)


@pytest.mark.parametrize("image", ["bb:1", "deb:py"])
def test_the_runtime_runs_in_an_image_without_interpreters_and_without_a_libc(image: str, docker_daemon: str) -> None:
    need("the runtime (harness agents install runtime)", PACKAGE.installed_version() == PACKAGE.version)
    assert run(image, PYTHON, "-I", "-c", PYTHON_SAYS) == [PYTHON, "OpenSSL", [], ".pyc"]
    assert run(image, NODE, "-e", NODE_SAYS) == [NODE, "42", []]


def run(image: str, *command: str) -> list[object]:
    labels = [f"--label={name}={value}" for name, value in labels_of("sandbox", this_process()).items()]
    hardened = ["--network=none", "--read-only", "--user=10000:10000", "--cap-drop=ALL"]
    mount = f"--volume={PACKAGE.directory}:{RUNTIME}:ro"
    command = ("docker", "run", "--rm", *labels, *hardened, mount, image, *command)
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    namespaces: list[object] = json.loads(done.stdout)
    return namespaces
