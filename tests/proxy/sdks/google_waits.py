"""Run in google-genai's environment: asks with a short read timeout and prints the answer's text.

Usage: google_waits.py URL SECONDS REPEATS
"""

import sys

from google import genai
from google.genai import types

url, seconds, repeats = sys.argv[1:]
retries = types.HttpRetryOptions(attempts=int(repeats) + 1, initial_delay=0.1, max_delay=0.1)
options = types.HttpOptions(base_url=url, timeout=int(float(seconds) * 1000), retry_options=retries)
client = genai.Client(api_key="agent", http_options=options)
print(client.models.generate_content(model="m", contents="hi").text)
