"""The engine side: client, replicas and routing, starting SGLang, scripted and tiny stand-ins. No recording."""
