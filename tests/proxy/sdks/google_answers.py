"""Run in google-genai's environment with the proxy's URL: prints what its client makes of schemas and logprobs."""

import json
import sys
from typing import Any

import pydantic
from google import genai
from google.genai import types


class Title(pydantic.BaseModel):
    title: str


def chosen(answer: types.GenerateContentResponse) -> list[Any]:
    """Token, logprob and number of alternatives of each token of an answer or a part of it."""
    [candidate] = answer.candidates or []
    if (result := candidate.logprobs_result) is None:
        return []
    tops = [len(place.candidates or []) for place in result.top_candidates or []]
    tokens = [(token.token, token.log_probability) for token in result.chosen_candidates or []]
    return [[*token, top] for token, top in zip(tokens, tops, strict=True)]


def main() -> None:
    client = genai.Client(api_key="agent", http_options=types.HttpOptions(base_url=sys.argv[1]))
    config = types.GenerateContentConfig(
        response_mime_type="application/json", response_schema=Title, response_logprobs=True, logprobs=2
    )
    whole = client.models.generate_content(model="tiny", contents="hello", config=config)
    parts = list(client.models.generate_content_stream(model="tiny", contents="hello", config=config))
    print(
        json.dumps(
            {
                "limit": client.models.get(model="tiny").input_token_limit,
                "parsed": isinstance(whole.parsed, Title) and whole.parsed.title,
                "whole": chosen(whole),
                "streamed": [token for part in parts for token in chosen(part)],
                "average": whole.candidates[0].avg_logprobs if whole.candidates else None,
            }
        )
    )


main()
