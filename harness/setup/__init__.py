"""What a run needs before its first rollout: proxy and engine, sandbox backend, places. No attempts."""
