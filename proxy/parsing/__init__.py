"""From sampled text to reasoning, content and tool calls. Nothing is rendered here."""
