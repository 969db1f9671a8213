"""Stream a chat from a swarm with the official `openai` package.

    python examples/openai_client.py [BASE_URL] [QUESTION]

BASE_URL defaults to $OPENAI_BASE_URL, else to the gateway that `swarm serve` opens on this machine.
"""

from __future__ import annotations

import os
import sys

from openai import OpenAI

DEFAULT_BASE_URL = "http://127.0.0.1:8080/v1"


def main() -> None:
    base_url = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("OPENAI_BASE_URL", DEFAULT_BASE_URL)
    question = sys.argv[2] if len(sys.argv) > 2 else "The json module can be used to"
    client = OpenAI(base_url=base_url, api_key="none")  # the gateway asks for no key; the package insists on one

    model = client.models.list().data[0].id
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=64,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            print(chunk.choices[0].delta.content, end="", flush=True)
        if chunk.usage:
            print(f"\n\n{chunk.usage.prompt_tokens} + {chunk.usage.completion_tokens} tokens of {model}")


if __name__ == "__main__":
    main()
