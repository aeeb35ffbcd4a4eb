"""Rollouts in the formats of other tools (docs/traces.md): ATIF (both ways), chat, session traces, spans. Files for
trainers are in proxy/pool/export.
"""
