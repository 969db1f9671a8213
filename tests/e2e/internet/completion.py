"""Asks a gateway for a stream, inside a host: `python completion.py URL BODY`; prints each piece with its time."""

from __future__ import annotations

import json
import sys
import time
import urllib.request

ANSWER_S = 120.0


def main() -> None:
    url, body = sys.argv[1:3]
    base = url.removesuffix("/v1")
    end = time.monotonic() + ANSWER_S
    while True:
        try:
            with urllib.request.urlopen(base + "/health", timeout=5):
                break
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)
    request = urllib.request.Request(url + "/completions", body.encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
        for line in answer:
            if line.startswith(b"data: ") and b"[DONE]" not in line:
                event = json.loads(line.removeprefix(b"data: "))
                print(json.dumps({"at": time.monotonic(), "event": event}), flush=True)
    print(json.dumps({"end": True}), flush=True)


if __name__ == "__main__":
    main()
