"""Scripts that list and end the processes of a container from inside it, so that they work on a remote daemon too.

Any /bin/sh runs them without starting a process, since a sandbox at its limit of processes cannot start one. They spare
pid 1, the main process (its oldest child) and the processes that were kept, each with its descendants. A process is
identified by pid and start time; its name and environment are not trusted. Where the agent is root (profile harbor), it
can kill the script: then it is repeated, and in the end the sandbox is given up.
"""

from collections.abc import Iterable

COMMAND = "BLACKFORGE_COMMAND"
"""Name of the environment variable with the command that MERGED runs. As an argument, `pgrep -f` would find it."""
MERGED = f"""
_blackforge_command=${COMMAND}
unset {COMMAND}
trap : HUP INT QUIT TERM USR1 USR2
exec 2>&-
(exec /bin/sh -c "$_blackforge_command" 2>&1)
"""
"""Runs a shell command, with its stderr in its stdout. The outer shell outlives a signal to the command's process
group. It prints nothing itself, for example about a signal that ended the command: its stderr stays closed, and only
the subshell opens one."""

_LOOK = r"""
look() {
    processes=
    for directory in /proc/[0-9]*; do
        all=
        { while IFS= read -r line || [ -n "$line" ]; do all="$all$line "; done <"$directory/stat"; } 2>/dev/null
        set -- ${all##*) }  # a name may hold blanks, brackets and line breaks: fields are counted from the last bracket
        case "${1:-Z}" in Z | X) continue ;; esac
        [ "${directory#/proc/}" = $$ ] || processes="$processes ${directory#/proc/}:$2:${20}:$1"
    done
}
"""

TABLE = (
    _LOOK
    + r"""
look
for one in $processes; do
    rest=${one#*:} one=${one%%:*}
    rest=${rest#*:}
    echo "$one:${rest%:*}"
done
"""
)
"""Prints `pid:start` of every process but itself."""

END = (
    _LOOK
    + r"""
split() {
    IFS=:
    set -- $1
    unset IFS
    pid=$1 parent=$2 start=$3 state=$4
}
kept=" $* "
ended=0 seen=" " signal=STOP
round=0
while [ $round -lt 1000 ]; do
    round=$((round + 1))
    look
    main= first=
    for one in $processes; do
        split $one
        [ $parent = 1 ] || continue  # on a busy machine a command (its parent is outside: 0) may start before main
        if [ -z "$main" ] || [ $start -lt $first ] || { [ $start = $first ] && [ $pid -lt $main ]; }; then
            main=$pid first=$start
        fi
    done
    spared=" 1 $main "
    for one in $processes; do
        split $one
        case "$kept" in *" $pid:$start "*) spared="$spared$pid " ;; esac
    done
    grown=1
    while [ $grown = 1 ]; do
        grown=0
        for one in $processes; do
            split $one
            [ $parent = 1 ] && continue  # adopted: it may be anybody's
            case "$spared" in *" $pid "*) continue ;; esac
            case "$spared" in *" $parent "*) spared="$spared$pid " grown=1 ;; esac
        done
    done
    left=0 awake=0
    for one in $processes; do
        split $one
        case "$spared" in *" $pid "*) continue ;; esac
        left=$((left + 1))
        case "$seen" in *" $pid:$start "*) ;; *) seen="$seen$pid:$start " ended=$((ended + 1)) ;; esac
        case "$signal$state" in STOPT | STOPt) continue ;; esac
        kill -$signal $pid 2>/dev/null
        awake=1
    done
    # Who is stopped holds its place in the limit of processes, so others cannot fork in its stead while all are killed.
    if [ $awake = 0 ] || [ $round = 30 ]; then
        signal=KILL
    fi
    if [ $left = 0 ]; then
        echo "ended $ended"
        exit 0
    fi
done
echo "$left processes survive SIGKILL"
exit 1
"""
)
"""Ends all processes that are not spared. Arguments: the kept processes, as TABLE prints them. Last line: `ended N`."""

OOM_KILLS = (
    "cat /sys/fs/cgroup/memory.events /sys/fs/cgroup/memory/memory.oom_control 2>/dev/null "
    "| while read -r name count; do case $name in oom_kill) echo $count ;; esac; done"
)
"""Prints how often the kernel killed a process of the container for lack of memory (cgroup v2 or v1)."""

PARENTS = "-eo pid,ppid"
"""Arguments of ps: the daemon lists a container's processes with their parents, as its own machine sees them."""


def only_main(processes: Iterable[tuple[int, int]]) -> bool:
    """Whether these (pid, parent) are a container's first process, its only child and what descends from that."""
    parents = dict(processes)
    first = [pid for pid, parent in parents.items() if parent not in parents]
    return len(first) == 1 and list(parents.values()).count(first[0]) <= 1
