"""The tokens of a call: their path, their text, and what the step that trained them gave each. No other fields of a
call.
"""
