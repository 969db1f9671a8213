"""Prints the JSON at a URL on one line, inside a host: `python ask_json.py URL`."""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request


def main() -> None:
    try:
        with urllib.request.urlopen(sys.argv[1], timeout=10) as answer:
            print(json.dumps(json.load(answer)), flush=True)
    except urllib.error.HTTPError as error:
        print(json.dumps({"status": error.code}), flush=True)


if __name__ == "__main__":
    main()
