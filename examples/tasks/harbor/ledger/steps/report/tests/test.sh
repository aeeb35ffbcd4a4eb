#!/bin/sh
got=$(cd / && python3 /app/report.py /tests/one.ledger /tests/two.ledger)
if [ "$got" = "a -3.00
b 0.05
c 1000.10" ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
