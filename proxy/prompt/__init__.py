"""Turns messages into token ids: chat template, splice of recorded turns, token cache. Parsing is in proxy/parsing."""
