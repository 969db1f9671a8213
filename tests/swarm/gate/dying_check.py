"""Stands in for `swarm.gate.architecture_check`: dies, hangs, or says what it should not, by name."""

from __future__ import annotations

import json
import os
import sys
import time

name = sys.argv[1]
if name == "dies":
    print(
        "comparing dies: F32\ncomparing dies: Q4_K\n/src/ggml.c:1: GGML_ASSERT(a == b) failed",
        file=sys.stderr,
        flush=True,
    )
    os.abort()
if name == "hangs":
    time.sleep(60)
if name == "talks":
    print("hello")
else:
    report = {"name": name, "source": name, "status": "identical", "min_cosine": 1.0, "reason": ""}
    print(json.dumps(report | {"variants": ["F32"], "activations": ["swiglu"]}))
