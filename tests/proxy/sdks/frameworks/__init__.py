"""A task of two steps for each SDK and framework, run in its own environment with the key and address of the proxy.

Each script asks how warm it is (two tools, one after the other) and, where the framework has it, for a record of a
given form. Its last line of output is JSON: the answer and the record.
"""
