"""What surrounds a call over HTTP: keys, admission, limits, error pages, responses and metrics.

The formats of requests and answers are in proxy/dialects, the work on tokens in proxy/prompt and proxy/recording.
"""
