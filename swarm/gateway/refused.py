"""Parameters of a request that would change its answer and are not served: refused by name, never ignored. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from swarm.gateway.errors import Json, RequestRefused

_NO_SAMPLER = "this sampler is not served; temperature, top_p, top_k and min_p are"
# Parameter -> (values that ask for nothing, why others are refused).
REFUSED: Mapping[str, tuple[tuple[object, ...], str]] = {
    "suffix": (("",), "text cannot be inserted before a suffix"),
    "functions": (([],), "use tools"),
    "function_call": (("none", "auto"), "use tool_choice"),
    "modalities": ((["text"],), "answers are text"),
    "audio": ((), "answers are text"),
    "prediction": ((), "predicted outputs are not served"),
    "web_search_options": ((), "the web is not searched"),
    # Of vLLM
    "stop_token_ids": (([],), "use stop, or logit_bias"),
    "min_tokens": ((0,), "use ignore_eos, which goes on to max_tokens"),
    "guided_json": ((), "use response_format or json_schema"),
    "guided_grammar": ((), "use grammar"),
    "guided_regex": ((), "use grammar"),
    "guided_choice": (([],), "use grammar"),
    "structured_outputs": ((), "use response_format, json_schema or grammar"),
    "use_beam_search": ((False,), "answers are sampled"),
    "prompt_logprobs": ((), "a prompt's log probabilities are not returned"),
    "truncate_prompt_tokens": ((), "prompts are not cut"),
    # Of llama-server
    "n_predict": ((), "use max_tokens"),
    "mirostat": ((0,), _NO_SAMPLER),
    "typical_p": ((1, 1.0), _NO_SAMPLER),
    "xtc_probability": ((0, 0.0), _NO_SAMPLER),
    "dry_multiplier": ((0, 0.0), _NO_SAMPLER),
    "dynatemp_range": ((0, 0.0), _NO_SAMPLER),
    "top_n_sigma": ((-1, -1.0), _NO_SAMPLER),
    "samplers": ((), "their order is llama.cpp's own"),
    "lora": (([],), "adapters are not served"),
}


def check_refused(body: Json) -> None:
    """Raise RequestRefused if a body asks for what is not served."""
    for name, (harmless, reason) in REFUSED.items():
        value = body.get(name)
        # 1 == True and 0 == False in Python, not in JSON
        if value is not None and not any(type(value) is type(other) and value == other for other in harmless):
            raise RequestRefused(f"{name} is not supported: {reason}", param=name, code="unsupported_parameter")
