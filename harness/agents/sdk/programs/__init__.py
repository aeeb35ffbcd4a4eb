"""The programs, one for each SDK, which only their bundles can run. They are copied there, and import only each other.

Each imports its SDK when it works, as this project's environment has none of them.
"""
