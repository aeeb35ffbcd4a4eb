"""Logprobs by transformers, in its own process: it needs the stand-in for torchvision on its path."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from proxy.engine.sglang import CPU_PATH
from trainer.data.row import TrainingRow

CODE = """
import json, sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32, attn_implementation="eager")
logprobs = []
with torch.no_grad():
    for ids in json.load(sys.stdin):
        logits = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        logprobs.append(logits.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist())
json.dump(logprobs, sys.stdout)
"""


def transformers_gap(directory: Path, rows: Sequence[TrainingRow]) -> float:
    """max |recorded logprob - that of transformers with this model directory| over the trained tokens."""
    environment = {**os.environ, "PYTHONPATH": str(CPU_PATH), "HF_HUB_OFFLINE": "1"}
    output = subprocess.run(
        [sys.executable, "-c", CODE, str(directory)],
        input=json.dumps([row.tokens.tolist() for row in rows]),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env=environment,
    ).stdout
    gaps = [
        np.abs(np.array(logprobs)[row.places - 1] - row.rollout_logp[row.places])
        for row, logprobs in zip(rows, json.loads(output), strict=True)
    ]
    return float(np.concatenate(gaps).max())
