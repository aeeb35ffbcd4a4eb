#!/bin/sh
expect() { # LOG N LINES
    got=$(/app/slow "$1" "$2" 2>&1) && [ "$got" = "$3" ] || { echo "/app/slow $1 $2 printed:"; echo "$got"; exit 1; }
}
check() {
    expect /tests/access.log 2 "/report 720.0
/search 325.0"
    expect /tests/other.log 3 "/b 10.5
/c 10.5
/a 3.3"
    expect /tests/other.log 9 "/b 10.5
/c 10.5
/a 3.3"
}
if (check >&2); then echo 1; else echo 0; fi > /logs/verifier/reward.txt
