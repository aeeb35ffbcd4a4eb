"""Labels name their owner, and it is known whether it lives."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace

from sandboxes.base import Spec
from sandboxes.docker.labels import labels_of, read_owner, relaxed, this_process
from sandboxes.local.processes import start_of
from tests.conftest import need


def test_an_owner_is_read_back_from_its_labels_and_is_alive_as_long_as_its_process_runs() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        started = start_of(child.pid)
        assert started is not None
        owner = replace(this_process(), pid=child.pid, started=started)
        read = read_owner(labels_of("sandbox", owner))
        assert read == owner and read.alive() is True
        child.kill()
    assert owner.alive() is False


def test_a_pid_that_was_given_out_again_or_an_earlier_boot_is_not_the_owner() -> None:
    here = this_process()
    assert here.alive() is True
    assert replace(here, started=here.started - 1).alive() is False
    assert replace(here, boot="another pid:[1]").alive(local=True) is False


def test_what_cannot_be_told_from_here_is_not_judged() -> None:
    here = this_process()
    assert replace(here, boot="another pid:[1]", host="elsewhere").alive(local=True) is None
    assert replace(here, boot="another pid:[1]").alive() is None  # on a remote daemon: a machine of the same name
    assert replace(here, boot=f"{here.boot.split()[0]} pid:[1]", pid=1).alive(local=True) is None  # another container
    assert replace(here, boot="").alive(local=True) is None
    assert read_owner({"maintainer": "somebody"}) is None


def test_only_what_goes_beyond_the_strictest_counts_as_relaxed() -> None:
    assert relaxed(Spec()) == []
    assert relaxed(Spec(memory_mb=512, cpus=1, network="none")) == []
    loose = Spec(profile="harbor", network="full", memory_mb=None, pids=9999)
    assert relaxed(loose) == ["profile=harbor", "network=full", "memory_mb=unlimited", "pids=9999"]


HIDDEN = """
import os, sys
from dataclasses import replace
from sandboxes.docker.labels import this_process
owner = replace(this_process(), pid=os.getppid())
os.setgroups([]), os.setgid(65534), os.setuid(65534)
print(owner.alive(), replace(owner, pid=1 << 22).alive())
"""


def test_a_process_that_the_system_hides_from_us_is_not_taken_for_dead() -> None:
    need("unshare, as root (util-linux)", shutil.which("unshare") is not None and os.geteuid() == 0)
    hide = 'mount -t proc -o hidepid=2 proc /proc && "$@"'
    result = subprocess.run(
        ["unshare", "--mount", "sh", "-c", hide, "sh", sys.executable, "-c", HIDDEN], capture_output=True, text=True
    )
    assert result.stdout.split() == ["None", "False"], result.stderr
