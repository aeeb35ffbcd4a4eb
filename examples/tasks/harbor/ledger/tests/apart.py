"""Runs programs under test where they can neither read the tests nor write the reward, and writes the reward.

They run as `nobody`, with no way back to root. All that they started is ended before the reward is written.
"""

import ctypes
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

NOBODY = 65534
NO_NEW_PRIVILEGES = 38
MAX_OUTPUT = 1 << 24
SECONDS = 50
TESTS, LOGS, WORK = Path("/tests"), Path("/logs/verifier"), Path("/app")


def run(*command, given=""):
    """Run a command as nobody, and return its exit code and what it printed. The code is None if it did not end."""
    code, end_nobody = None, killer()
    with tempfile.TemporaryFile() as printed:
        try:
            code = subprocess.run(
                command,
                input=given.encode(),
                stdout=printed,
                stderr=subprocess.DEVNULL,
                timeout=SECONDS,
                cwd="/",
                env={"PATH": os.environ["PATH"]},
                preexec_fn=become_nobody,
            ).returncode
        except (OSError, subprocess.SubprocessError) as error:
            print(error, file=sys.stderr)
        finally:
            end_nobody()
        printed.seek(0)
        return code, printed.read().decode(errors="replace")


def become_nobody():
    """Give up all rights for good: no setuid program brings them back."""
    ctypes.CDLL(None).prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_OUTPUT, MAX_OUTPUT))
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)


def killer():
    """Fork now, while there are processes to be had, and return what has the fork kill all processes of nobody."""
    begin, start = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(start)
        os.read(begin, 1)
        become_nobody()
        os.kill(-1, signal.SIGKILL)
        os._exit(0)

    def end_nobody():
        os.close(start)
        os.waitpid(process, 0)
        os.close(begin)

    return end_nobody


def judge(test):
    """Write reward 1 if `test` returns nothing, else 0, and print what it returns: what is wrong."""
    for place in (TESTS, LOGS):
        place.chmod(0o700)
    subprocess.run(["chmod", "-R", "a+rX", WORK], check=False)  # whatever umask the work was done with
    wrong = test()
    for path in LOGS.iterdir():  # Harbor prefers other files to this one
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    (LOGS / "reward.txt").write_text("0\n" if wrong else "1\n")
    print(wrong or "right", file=sys.stderr)
