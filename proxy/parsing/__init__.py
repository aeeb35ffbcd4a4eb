"""Parses sampled text into reasoning, content and tool calls. Prompts are rendered elsewhere (proxy/prompt)."""
