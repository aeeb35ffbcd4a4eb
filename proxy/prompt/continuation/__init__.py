"""Finds the recorded completions that a request continues, repeats or quotes. splice.py above joins their ids."""
