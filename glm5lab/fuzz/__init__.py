"""Damaged GGUF headers by the thousand: each read ends in a result or in an error of ours."""
