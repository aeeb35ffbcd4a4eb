"""Talks to engines: client, replicas, routing, starting SGLang; the scripted engine, the tiny model. No recording."""
