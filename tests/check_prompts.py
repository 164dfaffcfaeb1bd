"""The prompts that tests of the check share."""

from glm5lab.check.cases import normal_tokens, random_prompts
from glm5lab.gguf.reader import open_gguf


def prompts_of(file, lengths):
    """One seeded prompt a length, of the file's ordinary tokens."""
    return random_prompts(normal_tokens(open_gguf(file).metadata, str(file)), lengths, seed=0)
