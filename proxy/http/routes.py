"""The paths of the model routes and the dialect of each, which requests, answers and errors of that path have."""

from proxy.dialects import anthropic, chat_completions, gemini, responses, text_completions
from proxy.dialects.base import CountingDialect, Dialect

ANY_PREFIX = r"/{prefix:(?:.*/)?}"
DIALECTS: dict[str, Dialect] = {
    "chat/completions": chat_completions,
    "messages": anthropic,
    "responses": responses,
    "completions": text_completions,
    "models/{model:.+}:generateContent": gemini,
    "models/{model:.+}:streamGenerateContent": gemini,
}
"""The path below the base URL -> its dialect. The first that fits counts: chat/completions goes before completions."""
MODEL = r"models/{model:(?!.*:(?:generateContent|streamGenerateContent|countTokens)$).+}"
"""The path of one model, whose name may contain slashes and colons; not those of Gemini's calls."""
COUNTING: dict[str, CountingDialect] = {"messages/count_tokens": anthropic, "models/{model:.+}:countTokens": gemini}
"""The same for the routes that count a prompt's tokens."""


def dialect_of(path: str) -> Dialect:
    """The dialect of a request's path; OpenAI's where the path has none, since most clients read it."""
    endings = ((name.rpartition("}")[2], dialect) for name, dialect in [*DIALECTS.items(), *COUNTING.items()])
    return next((dialect for ending, dialect in endings if ending in path), chat_completions)


def served_routes() -> str:
    """All model routes, for error messages."""
    served = ", ".join(f"POST .../{path.replace(':.+', '')}" for path in [*DIALECTS, *COUNTING])
    return f"{served}, GET .../models and .../models/{{model}}, GET and DELETE .../responses/{{id}}"
